"""Arbitrary hellos, connections that come and go, and unwanted descriptors, beside a good engine.

Each connection gets a welcome or a rejection with a reason, and each rejection is counted.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
from collections import Counter
from collections.abc import Iterator
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.daemon import Daemon, until
from support.fuzz import changed, depths, fuzz, pieces, refusals_by_reason, unharmed, values
from support.raw_door import (
    RawLine,
    RawSession,
    attach_path,
    raw_contract,
    raw_hello,
    seats,
)

from kvhearth.errors import KVHearthError, Reason
from kvhearth.wire.frames import rebuild_error
from kvhearth.wire.handshake import FRAME_BYTES_MAX, FrameDecoder, encode_frame
from kvhearth_lab.harness.engine import Engine

HANDSHAKE_S = 1.0
"""The daemon's handshake timeout."""
DESCRIPTORS_MAX = 253
"""The kernel's limit for one message."""
GOOD_CONTRACT = json.loads(raw_contract().to_json())


DAEMON = {"attach_timeout_s": HANDSHAKE_S}


@contextlib.contextmanager
def nothing_left(daemon: Daemon, neighbour: Engine) -> Iterator[None]:
    """Like ``unharmed``; also drains sessions that were admitted and left without a goodbye."""
    with unharmed(daemon, neighbour):
        yield
        boot_id = daemon.stats().boot_id
        until(lambda: sum(seat.attached for seat in seats(daemon)) == 1, "the others have left")
        for seat in [seat for seat in seats(daemon) if not seat.attached]:
            said = {"previous_session": seat.session, "previous_boot": boot_id}
            RawSession(daemon, **said, previous_drained=True).close()
        until(lambda: len(seats(daemon)) == 1, "their copies are done")


def answered(answer: dict[str, Any]) -> Reason | None:
    """Returns the reason of a rejection; None for a welcome."""
    if answer["kind"] == "welcome":
        return None
    assert answer["kind"] == "refused", answer
    assert 0 < len(answer["message"]) <= 1024
    error = rebuild_error(answer["reason"], answer["message"], answer["details"])
    assert str(error.reason) == answer["reason"], "a word of the error table"
    return error.reason


def whole(data: bytes) -> bool:
    """Whether a daemon that has read all of ``data`` needs no more for its answer."""
    try:
        return bool(FrameDecoder().feed(data))
    except KVHearthError:
        return True


def said(daemon: Daemon, parts: list[bytes]) -> Reason | None:
    """Sends ``parts`` on a new connection and returns the outcome."""
    with RawLine(attach_path(daemon)) as line:
        for part in parts:
            line.send(part)
        if not whole(b"".join(parts)):
            line.half_close()
        reason = answered(line.answer())
        if reason is None:
            line.send(encode_frame({"kind": "bye"}))
            # Bytes after the hello may be the head of a frame that swallows the goodbye.
            line.half_close()
        assert line.ended(), "it has answered, but keeps the connection"
        return reason


# -- hellos ------------------------------------------------------------------------------------


def frame(body: bytes) -> bytes:
    """A frame with this body."""
    return struct.pack("<I", len(body)) + body


def written(message: dict[str, Any], ascii_only: bool) -> bytes:
    """Encodes JSON; half surrogate pairs become bytes that are not UTF-8 unless ``ascii_only``."""
    return json.dumps(message, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")


@st.composite
def hellos(draw: st.DrawFn) -> bytes:
    """Draws a hello's body, slightly or badly wrong."""
    message = draw(changed(raw_hello()))
    if draw(st.booleans()):
        contract = draw(changed(GOOD_CONTRACT))
        if draw(st.booleans()):
            contract["groups"] = [draw(changed(GOOD_CONTRACT["groups"][0]))]
        message["contract"] = json.dumps(contract)
    body = written(message, draw(st.booleans()))
    if draw(st.booleans()):
        twice = written(draw(changed(raw_hello())), True)
        body = body[:-1] + b"," + twice[1:]
    return body


nested = st.integers(1, 60_000).flatmap(
    lambda depth: st.sampled_from(
        [b"[" * depth, b'{"a":' * (depth // 5), b"[" * depth + b"]" * depth]
    )
)
bodies = (
    hellos()
    | nested
    | st.binary(max_size=60)
    | st.builds(written, values.map(lambda v: {"kind": v}), st.booleans())
)


@st.composite
def openings(draw: st.DrawFn) -> bytes:
    """Draws a peer's first bytes: a frame, half of one, one of a wrong length, or two.

    A peer that sends nothing is not rejected: probes for a living daemon do that.
    """
    body = draw(bodies)
    match draw(
        st.sampled_from(["whole", "whole", "whole", "cut", "long", "short", "huge", "more"])
    ):
        case "cut":
            data = frame(body)
            return data[: draw(st.integers(0, len(data)))]
        case "long":
            return struct.pack("<I", len(body) + draw(st.integers(1, 9))) + body
        case "short":
            return struct.pack("<I", max(0, len(body) - draw(st.integers(1, 9)))) + body
        case "huge":
            return struct.pack("<I", draw(st.integers(FRAME_BYTES_MAX + 1, 0xFFFFFFFF))) + body
        case "more":
            return frame(body) + draw(st.binary(max_size=40))
    return frame(body)


@depths(250)
def test_any_opening(daemon: Daemon, neighbour: Engine, examples: int) -> None:
    refused: Counter[Reason] = Counter()
    welcome = 0

    @settings(fuzz, max_examples=examples)
    @given(openings().filter(bool), st.lists(st.integers(0, 9999), max_size=2))
    @example(frame(b'{"kind":"hello","kind":"bye"}'), [])
    @example(frame(b"1" * 10_000), [])
    @example(frame(json.dumps(raw_hello(rank=10**400)).encode()), [])
    @example(frame(json.dumps(raw_hello(engine_id="\ud800")).encode()), [1, 2])
    @example(frame(json.dumps(raw_hello()).encode("utf-16")), [])
    def say(data: bytes, cuts: list[int]) -> None:
        nonlocal welcome
        reason = said(daemon, pieces(data, cuts))
        if reason is None:
            welcome += 1
        else:
            refused[reason] += 1

    before, opened = refusals_by_reason(daemon), daemon.counters()["sessions_opened"]
    with nothing_left(daemon, neighbour):
        say()
        after = refusals_by_reason(daemon)
        assert daemon.counters()["sessions_opened"] == opened + welcome
    for reason, count in refused.items():
        # After a welcome, bytes that follow may be rejected, too.
        more = welcome if reason is Reason.BAD_MESSAGE else 0
        assert count <= after[reason] - before[reason] <= count + more
    assert refused[Reason.INTERNAL] == 0


# -- connections that come and go ------------------------------------------------------------------

LINES = 8
moves = st.lists(
    st.tuples(
        st.integers(0, LINES - 1),
        st.sampled_from(["hello", "half", "rest", "bye", "junk", "listen", "close", "half close"]),
    ),
    max_size=40,
)
HELLO = encode_frame(raw_hello())


class Crowd:
    """Connections that send anything in any order, and close at any time."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self._lines: dict[int, RawLine] = {}

    def move(self, number: int, what: str) -> None:
        """Lets one connection act; a missing one connects first."""
        if number not in self._lines:
            self._lines[number] = RawLine(attach_path(self._daemon))
        line = self._lines[number]
        data = {
            "hello": encode_frame(raw_hello()),
            "half": HELLO[:20],
            "rest": HELLO[20:],
            "bye": encode_frame({"kind": "bye"}),
            "junk": b"\xff" * 50,
        }
        if what in data:
            line.send(data[what])
        elif what == "half close":
            with contextlib.suppress(OSError):
                line.half_close()
        elif what == "close":
            self._lines.pop(number).close()

    def close(self) -> None:
        """Closes all connections."""
        for line in self._lines.values():
            line.close()


@depths(100)
def test_lines_that_come_and_go(daemon: Daemon, neighbour: Engine, examples: int) -> None:
    @settings(fuzz, max_examples=examples)
    @given(moves)
    def play(steps: list[tuple[int, str]]) -> None:
        with contextlib.closing(Crowd(daemon)) as crowd:
            for number, what in steps:
                crowd.move(number, what)

    before = daemon.counters()
    with nothing_left(daemon, neighbour):
        play()
    after = daemon.counters()
    # No session stays: each one that was opened has been closed, except the neighbour's.
    came = after["sessions_opened"] - before["sessions_opened"]
    assert came == after["sessions_closed"] - before["sessions_closed"]


# -- unwanted descriptors --------------------------------------------------------------------------


def at_its_end(read_end: int) -> bool:
    """Whether the pipe has no writer left."""
    try:
        return os.read(read_end, 1) == b""
    except BlockingIOError:
        return False


@depths(60)
def test_descriptors_that_nobody_wants(daemon: Daemon, neighbour: Engine, examples: int) -> None:
    """A pipe shows whether all copies of its other end are closed."""

    @settings(fuzz, max_examples=examples)
    @given(
        st.sampled_from([HELLO, HELLO[:9], b"\xff" * 9, HELLO + HELLO, frame(b"[]")]),
        st.lists(st.integers(0, 999), max_size=3),
        st.integers(1, DESCRIPTORS_MAX),
    )
    @example(HELLO, [], DESCRIPTORS_MAX)
    def pass_on(data: bytes, cuts: list[int], count: int) -> None:
        read_end, write_end = os.pipe()
        try:
            with RawLine(attach_path(daemon)) as line:
                try:
                    for part in pieces(data, cuts):
                        line.send(part, [write_end] * count)
                finally:
                    os.close(write_end)
                if not whole(data):
                    line.half_close()
                if answered(line.answer()) is None:
                    line.send(encode_frame({"kind": "bye"}), [read_end] * count)
                assert line.ended()
            os.set_blocking(read_end, False)
            until(lambda: at_its_end(read_end), "the daemon holds no end of it")
        finally:
            os.close(read_end)

    with nothing_left(daemon, neighbour):
        pass_on()
