"""Bad input on the attach socket of a real daemon: a reason, a count, and no other effect."""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Iterator
from typing import Any

import pytest
from support.daemon import Daemon, running_daemon, until
from support.raw_door import (
    PAGE_BYTES,
    RawLine,
    RawSession,
    attach_path,
    drop,
    end_well,
    fat_contract,
    raw_contract,
    raw_hello,
    refusals,
    refused,
    say,
    seats,
)

from kvhearth.contract import CONTRACT_PARTS_MAX, GroupKind, GroupSpec
from kvhearth.errors import Code, KVHearthError, Reason
from kvhearth.proto.v1 import cache_pb2 as pb
from kvhearth.version import PROTOCOL_VERSION
from kvhearth.wire.handshake import FRAME_BYTES_MAX, HEALTH_QUESTION, HELLO_PARTS_MAX, encode_frame

TIMEOUT_S = 0.6
"""Handshake timeout of the daemon in ``hasty``."""


DAEMON: dict[str, object] = {}
pytestmark = pytest.mark.usefixtures("unhurt_neighbour")


@pytest.fixture
def hasty() -> Iterator[Daemon]:
    """A daemon with the handshake timeout ``TIMEOUT_S``; the other daemons wait longer."""
    with running_daemon(arena=False, attach_timeout_s=TIMEOUT_S) as daemon:
        yield daemon
        end_well(daemon)


def frame(body: bytes) -> bytes:
    """A frame with this body."""
    return struct.pack("<I", len(body)) + body


def raw_frame(message: dict[str, Any]) -> bytes:
    """A frame with JSON in UTF-8, with escapes only where they are needed."""
    return frame(json.dumps(message, ensure_ascii=False).encode())


# -- frames ------------------------------------------------------------------------------------

BAD_FRAMES = {
    "garbage": b"\xff\x13\x37\xab" * 1000,
    "http": b"GET / HTTP/1.1\r\nHost: kvhearth\r\n\r\n",
    "length of 4 GiB": struct.pack("<I", 0xFFFFFFFF),
    "length just too large": struct.pack("<I", FRAME_BYTES_MAX + 1),
    "empty": frame(b""),
    "not JSON": frame(b"hello"),
    "cut JSON": frame(b'{"kind":"hello"'),
    "not UTF-8": frame(b'{"kind":"\xff\xfe"}'),
    "a list": frame(b"[]"),
    "a number": frame(b"7"),
    "a long number": frame(b"1" * 200_000),
    "a text": frame(b'"hello"'),
    "nested lists": frame(b"[" * 200_000),
    "nested objects": frame(b'{"a":' * 40_000),
    "no kind": frame(b"{}"),
    "another kind": frame(b'{"kind":"welcome"}'),
    "bye first": encode_frame({"kind": "bye"}),
    "two hellos at once": 2 * encode_frame(raw_hello(engine_id="two")),
}


@pytest.mark.parametrize("name", BAD_FRAMES)
def test_bad_frame(daemon: Daemon, name: str) -> None:
    before = daemon.counters()["attach_frames_bad"]
    with refused(daemon, Reason.BAD_MESSAGE):
        say(daemon, BAD_FRAMES[name])
    assert daemon.counters()["attach_frames_bad"] == before + 1


def test_a_frame_that_takes_long_to_parse(daemon: Daemon) -> None:
    """87,000 objects in one hello stop the loop for 10 ms; they are refused without parsing."""
    body = b'{"kind":"hello","x":[' + b"{}," * 80_000 + b"0]}"
    with refused(daemon, Reason.BAD_MESSAGE) as caught:
        say(daemon, frame(body))
    assert f"at most {HELLO_PARTS_MAX}" in caught.value.message


def test_a_user_of_no_tenant_is_refused_by_the_length_of_its_hello() -> None:
    """Nobody else's bytes are read; only the daemon's health may be asked for."""
    tenants = f"other={os.geteuid() + 1}:8MiB"
    with running_daemon(arena=False, tenants=tenants) as daemon:
        with RawLine(attach_path(daemon)) as line:
            line.send(struct.pack("<I", FRAME_BYTES_MAX))
            assert line.refusal().reason is Reason.PEER_NOT_ALLOWED
        with RawLine(attach_path(daemon)) as line:
            line.send(encode_frame(HEALTH_QUESTION))
            answer = line.answer()
            assert (answer["kind"], answer["serving"]) == ("health", True)
        for short in (frame(b"nonsense"), frame(b"{}")):
            with RawLine(attach_path(daemon)) as line:
                line.send(short)
                assert line.refusal().reason is Reason.PEER_NOT_ALLOWED
        end_well(daemon)


def test_who_says_nothing_and_leaves_is_nobody(daemon: Daemon) -> None:
    before = refusals(daemon, Reason.BAD_MESSAGE)
    with RawLine(attach_path(daemon)) as line:
        line.half_close()
        assert line.ended()
    assert refusals(daemon, Reason.BAD_MESSAGE) == before


@pytest.mark.parametrize("sent", [b"\x10", b"\x10\0\0\0", encode_frame(raw_hello())[:-1]])
def test_truncated_then_closed(daemon: Daemon, sent: bytes) -> None:
    with refused(daemon, Reason.BAD_MESSAGE), RawLine(attach_path(daemon)) as line:
        line.send(sent)
        line.half_close()
        raise line.refusal()


@pytest.mark.parametrize("sent", [b"", b"\x10", encode_frame(raw_hello())[:-1]])
def test_silence(hasty: Daemon, sent: bytes) -> None:
    with refused(hasty, Reason.DEADLINE) as caught, RawLine(attach_path(hasty)) as line:
        line.send(sent)
        raise line.refusal()
    assert f"{TIMEOUT_S} s" in caught.value.message


def test_one_byte_at_a_time_does_not_stretch_the_deadline(hasty: Daemon) -> None:
    with refused(hasty, Reason.DEADLINE), RawLine(attach_path(hasty), TIMEOUT_S / 10) as line:
        for byte in encode_frame(raw_hello()):
            line.send(bytes([byte]))
            try:
                raise line.refusal()
            except TimeoutError:
                continue


def test_gone_before_the_answer(daemon: Daemon) -> None:
    before = daemon.counters()
    for _ in range(20):
        with RawLine(attach_path(daemon)) as line:
            line.send(encode_frame(raw_hello()))
    opened = before["sessions_opened"] + 20
    until(lambda: daemon.counters()["sessions_opened"] == opened, "all were let in")
    until(lambda: daemon.stats().sessions == 1, "all have left")


# -- hellos ------------------------------------------------------------------------------------

BAD_HELLOS: dict[str, dict[str, Any]] = {
    "unknown field": {"surprise": 1},
    "long unknown field": {"x" * 100_000: 1},
    "no engine id": {"engine_id": ...},
    "no contract": {"contract": ...},
    "no protocol": {"protocol": ...},
    "rank is a text": {"rank": "0"},
    "rank is a truth": {"rank": True},
    "rank is a fraction": {"rank": 0.0},
    "rank is not a number": {"rank": float("nan")},
    "rank of 70 bits": {"rank": 1 << 70},
    "scheduler is a number": {"scheduler": 1},
    "contract is an object": {"contract": {}},
    "engine id is null": {"engine_id": None},
    "engine id is empty": {"engine_id": ""},
    "engine id is too long": {"engine_id": "e" * 257},
    "engine id breaks lines": {"engine_id": "a\nb"},
    "engine id is half a character": {"engine_id": "\ud800"},
    "rank out of range": {"rank": 1},
    "rank below -1": {"rank": -2},
    "worker without a rank": {"scheduler": False, "rank": -1},
}


@pytest.mark.parametrize("name", BAD_HELLOS)
def test_bad_hello(daemon: Daemon, name: str) -> None:
    with refused(daemon, Reason.BAD_MESSAGE) as caught:
        say(daemon, encode_frame(raw_hello(**BAD_HELLOS[name])))
    assert len(caught.value.message) < 200


@pytest.mark.parametrize("version", [0, PROTOCOL_VERSION + 1, -(1 << 63)])
def test_another_protocol(daemon: Daemon, version: int) -> None:
    with refused(daemon, Reason.PROTOCOL_VERSION) as caught:
        say(daemon, encode_frame(raw_hello(protocol=version)))
    assert f"daemon {PROTOCOL_VERSION}" in caught.value.message


def test_descriptors_that_nobody_asked_for(daemon: Daemon) -> None:
    count = daemon.descriptor_count()
    with open(os.devnull) as file, refused(daemon, Reason.BAD_MESSAGE):
        line = RawLine(attach_path(daemon))
        with line:
            line.send(BAD_FRAMES["not JSON"], [file.fileno()] * 10)
            raise line.refusal()
    until(lambda: daemon.descriptor_count() <= count, "none is left open")


# -- contracts ---------------------------------------------------------------------------------

GOOD = json.loads(raw_contract().to_json())
GROUP = GOOD["groups"][0]


def changed(**changes: Any) -> dict[str, Any]:
    return {name: value for name, value in {**GOOD, **changes}.items() if value is not ...}


def grouped(**changes: Any) -> dict[str, Any]:
    group = {name: value for name, value in {**GROUP, **changes}.items() if value is not ...}
    return changed(groups=[group])


BAD_CONTRACTS: dict[str, tuple[object, str]] = {
    "not JSON": ("{", ""),
    "a list": ("[]", ""),
    "nothing": ("{}", "model"),
    "65 KiB": (changed(model="m" * (65 << 10)), ""),
    "nested": ("[" * 3000, ""),
    "no model": (changed(model=...), "model"),
    "empty model": (changed(model=""), "model"),
    "model is a number": (changed(model=7), "model"),
    "long model": (changed(model="m" * 1025), "model"),
    "empty revision": (changed(revision=""), "revision"),
    "unknown field": (changed(colour="red"), "colour"),
    "unknown dtype": (changed(kv_dtype="int3"), "kv_dtype"),
    "another version": (changed(version=2), "version"),
    "keys of 8 bytes": (changed(hash_bytes=8), "hash_bytes"),
    "keys of 128 bytes": (changed(hash_bytes=128), "hash_bytes"),
    "no rank": (changed(tensor_parallel=0), "tensor_parallel"),
    "too many ranks": (changed(tensor_parallel=32, pipeline_parallel=32), "tensor_parallel"),
    "ranks are a truth": (changed(tensor_parallel=True), "tensor_parallel"),
    "ranks of 1000 digits": (changed(tensor_parallel=10**1000), "tensor_parallel"),
    "no groups": (changed(groups=...), "groups"),
    "empty groups": (changed(groups=[]), "groups"),
    "17 groups": (changed(groups=[GROUP] * 17), "groups"),
    "groups are an object": (changed(groups=GROUP), "groups"),
    "a group is a number": (changed(groups=[1]), "groups[0]"),
    "unknown kind": (grouped(kind="crystal"), "groups[0].kind"),
    "no kind": (grouped(kind=...), "groups[0].kind"),
    "no page": (grouped(page_bytes=...), "groups[0].page_bytes"),
    "a page of 0": (grouped(page_bytes=0), "groups[0].page_bytes"),
    "a page below 0": (grouped(page_bytes=-1), "groups[0].page_bytes"),
    "a page of 2 GiB": (grouped(page_bytes=2 << 30), "groups[0].page_bytes"),
    "a smaller page": (grouped(layers=2, token_bytes=1024), "groups[0].page_bytes"),
    "a larger page": (grouped(layers=1, token_bytes=64), "groups[0].page_bytes"),
    "torn elements": (
        changed(kv_dtype="float32", groups=[{**GROUP, "token_bytes": 1023}]),
        "groups[0].token_bytes",
    ),
    "no tokens": (grouped(block_tokens=0), "groups[0].block_tokens"),
    "more shards than ranks": (grouped(shards=2), "groups[0].shards"),
    "a window of a full group": (grouped(window_tokens=16), "groups[0].window_tokens"),
    "a sliding group without": (grouped(kind="sliding_window"), "groups[0].window_tokens"),
}


@pytest.mark.parametrize("name", BAD_CONTRACTS)
def test_bad_contract(daemon: Daemon, name: str) -> None:
    contract, field = BAD_CONTRACTS[name]
    text = contract if isinstance(contract, str) else json.dumps(contract)
    with refused(daemon, Reason.BAD_CONTRACT) as caught:
        say(daemon, encode_frame(raw_hello(contract=text)))
    assert caught.value.details.get("field", "") == field
    assert caught.value.status.code is Code.INVALID_ARGUMENT


def test_a_contract_that_takes_long_to_parse(daemon: Daemon) -> None:
    """Its brackets are escaped, thus the frame around it has few."""
    escaped = "\\u005b\\u005d\\u002c" * 14_000
    hello = raw_hello(contract="@")
    body = json.dumps(hello).replace("@", "\\u005b" + escaped + "0]")
    with refused(daemon, Reason.BAD_CONTRACT) as caught:
        say(daemon, frame(body.encode()))
    assert f"more than {CONTRACT_PARTS_MAX}" in caught.value.message


def test_a_page_that_no_slab_can_hold(daemon: Daemon) -> None:
    with refused(daemon, Reason.BAD_CONTRACT) as caught:
        say(daemon, encode_frame(raw_hello(contract=json.dumps(grouped(page_bytes=3 << 20)))))
    assert "groups[0].page_bytes" in caught.value.message


def test_a_refusal_is_short_whatever_it_is_about(daemon: Daemon) -> None:
    # Escaped, these 60,000 characters would be three times as long as a frame may be.
    contract = json.dumps(grouped(kind="\U0001f525" * 60_000), ensure_ascii=False)
    with refused(daemon, Reason.BAD_CONTRACT) as caught:
        say(daemon, raw_frame(raw_hello(contract=contract)))
    assert len(caught.value.message) <= 1024


def test_a_contract_that_grows_when_it_is_written_out(daemon: Daemon) -> None:
    contract = json.dumps(fat_contract(0), ensure_ascii=False)
    with refused(daemon, Reason.BAD_CONTRACT) as caught:
        say(daemon, raw_frame(raw_hello(contract=contract)))
    assert "canonical JSON" in caught.value.message


# -- hellos that the state forbids ---------------------------------------------------------------


def test_a_taken_place(daemon: Daemon) -> None:
    contract = raw_contract(tensor_parallel=2).to_json()
    with RawSession(daemon, engine_id="t", contract=contract, rank=0) as held:
        for place in ({"rank": 1}, {"rank": 0, "scheduler": False}, {"rank": -1}):
            with refused(daemon, Reason.RANK_TAKEN):
                say(daemon, encode_frame(raw_hello(engine_id="t", contract=contract, **place)))
        assert not held.call("Heartbeat", pb.HeartbeatRequest()).group_complete
        worker = {"engine_id": "t", "contract": contract, "scheduler": False, "rank": 1}
        with RawSession(daemon, **worker):
            assert held.call("Heartbeat", pb.HeartbeatRequest()).group_complete


def test_a_second_replica_with_the_same_engine_id(daemon: Daemon) -> None:
    """The first one's scheduler waits for its rank; the second one's must not take the place."""
    made = {"engine_id": "t", "contract": raw_contract(tensor_parallel=2).to_json()}
    worker = {**made, "scheduler": False, "rank": 1}
    with RawSession(daemon, **made, rank=0, process_group="first") as held:
        for place in ({**made, "rank": 0}, worker):
            for group in ("second", ""):
                with refused(daemon, Reason.RANK_TAKEN) as caught:
                    say(daemon, encode_frame(raw_hello(**place, process_group=group)))
                assert "runs already in other processes" in caught.value.message
                assert "engine_id of its own" in caught.value.message
        assert not held.call("Heartbeat", pb.HeartbeatRequest()).group_complete
        with RawSession(daemon, **worker, process_group="first"):
            assert held.call("Heartbeat", pb.HeartbeatRequest()).group_complete
    with RawSession(daemon, **worker, process_group="second"):
        """The name is free again."""


def test_another_contract_under_the_same_name(daemon: Daemon) -> None:
    other = raw_contract(revision="other", kv_dtype="int8", tensor_parallel=2)
    with RawSession(daemon, engine_id="t"), refused(daemon, Reason.CONTRACT_MISMATCH) as caught:
        worker = {"engine_id": "t", "scheduler": False, "rank": 1}
        say(daemon, encode_frame(raw_hello(contract=other.to_json(), **worker)))
    assert caught.value.status.code is Code.FAILED_PRECONDITION
    fields = caught.value.details["fields"].split(",")
    assert fields == ["kv_dtype", "revision", "tensor_parallel"]
    assert "revision: 'other' here, 'r' there" in caught.value.message


def test_a_mismatch_in_everything_is_still_a_frame(daemon: Daemon) -> None:
    ours, theirs = fat_contract(0, "a"), fat_contract(1, "\u00fc")
    with (
        RawSession(daemon, engine_id="t", contract=json.dumps(ours)),
        refused(daemon, Reason.CONTRACT_MISMATCH) as caught,
    ):
        say(daemon, encode_frame(raw_hello(engine_id="t", contract=json.dumps(theirs))))
    assert len(caught.value.message) <= 1024


def test_a_stale_incarnation(daemon: Daemon) -> None:
    with RawSession(daemon, engine_id="i") as first:
        incarnation = first.welcome["incarnation"]
        with refused(daemon, Reason.STALE_INCARNATION):
            worker = raw_hello(engine_id="i", incarnation=incarnation + 1, scheduler=False)
            say(daemon, encode_frame(worker))
    until(lambda: daemon.stats().sessions == 1, "it left")
    for stale in (incarnation, -1, (1 << 63) - 1):
        with refused(daemon, Reason.STALE_INCARNATION):
            say(daemon, encode_frame(raw_hello(engine_id="i", incarnation=stale)))
    with RawSession(daemon, engine_id="i") as second:
        assert second.welcome["incarnation"] == incarnation + 1


def test_a_lie_about_the_previous_session(daemon: Daemon) -> None:
    """A client may only report its own boot's and tenant's session as drained, and only once it is
    gone.
    """
    with RawSession(daemon, engine_id="old") as old:
        extents = old.reserve(2)
        lie = {"previous_session": old.welcome["session"], "previous_drained": True}
        RawSession(daemon, **lie, previous_boot=old.boot_id).close()
        RawSession(daemon, **lie, previous_boot="0" * 32).close()
        assert old.abort(extents).freed_slots == 2


# -- attach sockets ------------------------------------------------------------------------------

AFTER_WELCOME: dict[str, bytes] = {
    "a second hello": encode_frame(raw_hello()),
    "garbage": BAD_FRAMES["garbage"],
    "length of 4 GiB": BAD_FRAMES["length of 4 GiB"],
    "not JSON": BAD_FRAMES["not JSON"],
    "another kind": frame(b'{"kind":"ping"}'),
    "a list as kind": frame(b'{"kind":["bye"]}'),
}


@pytest.mark.parametrize("name", AFTER_WELCOME)
def test_bad_bytes_on_a_life_line_end_the_session(daemon: Daemon, name: str) -> None:
    session = RawSession(daemon, map_arena=True)
    with refused(daemon, Reason.BAD_MESSAGE):
        session.line.send(AFTER_WELCOME[name])
        raise session.line.refusal()
    with refused(daemon, Reason.UNKNOWN_TOKEN):
        session.call("Heartbeat", pb.HeartbeatRequest())
    assert session.welcome["session"] not in [s.session for s in seats(daemon) if s.attached]
    drop(daemon, session)


def test_half_a_frame_on_a_life_line_is_no_end(daemon: Daemon) -> None:
    with RawSession(daemon) as session:
        session.line.send(encode_frame({"kind": "bye"})[:-1])
        for _ in range(3):
            session.call("Heartbeat", pb.HeartbeatRequest())


def test_what_the_wire_says_is_no_namespace_of_its_own(daemon: Daemon) -> None:
    """White space, order and escapes of the JSON do not make another namespace."""
    spaced = json.dumps(dict(reversed(GOOD.items())), indent=2)
    with RawSession(daemon) as one, RawSession(daemon, contract=spaced) as other:
        assert one.welcome["namespace"] == other.welcome["namespace"]


def test_the_sockets_take_any_user_whom_the_directory_lets_in(daemon: Daemon) -> None:
    for name in ("attach.sock", "calls.sock"):
        assert (daemon.socket_dir / name).stat().st_mode & 0o777 == 0o666
    assert (daemon.socket_dir / "admin.token").stat().st_mode & 0o777 == 0o600


def test_nothing_came_before_the_first_frame(daemon: Daemon) -> None:
    """The daemon does not speak first: a peer that only listens learns nothing."""
    with RawLine(attach_path(daemon), 0.1) as line, pytest.raises((TimeoutError, socket.timeout)):
        line.answer()


def test_a_good_contract_is_good() -> None:
    """The contract underlying the broken ones above is accepted."""
    groups = (GroupSpec(GroupKind.SLIDING_WINDOW, 16, PAGE_BYTES, window_tokens=64),)
    for contract in (raw_contract(), raw_contract(groups=groups)):
        assert contract.from_json(contract.to_json()) == contract
    with pytest.raises(KVHearthError):
        raw_contract(groups=())
