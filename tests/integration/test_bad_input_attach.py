"""Bad input and excess on the attach socket of a real daemon: a reason, a count, nothing else.

``tests/unit/test_bad_messages.py`` has the frames, hellos and contracts that are wrong.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import resource
import socket
import struct

import pytest
from support.daemon import Daemon, running_daemon, until
from support.raw_door import (
    OTHER_UID,
    PAGE_BYTES,
    RawLine,
    RawSession,
    as_root,
    as_user,
    attach_path,
    drop,
    end_well,
    fat_contract,
    goes_on,
    half_open,
    new_keys,
    raw_contract,
    raw_hello,
    refusals,
    refused,
    say,
    seats,
)

from kvhearth.errors import Code, Reason
from kvhearth.proto.v1 import cache_pb2 as pb
from kvhearth.wire.handshake import FRAME_BYTES_MAX, HEALTH_QUESTION, encode_frame
from kvhearth_lab.harness.engine import contract_of, engine_of

TIMEOUT_S = 1.5
"""Handshake timeout of the daemon in ``hasty``."""
DAEMON: dict[str, object] = {}
pytestmark = pytest.mark.usefixtures("unhurt_neighbour")


def frame(body: bytes) -> bytes:
    """A frame with this body."""
    return struct.pack("<I", len(body)) + body


# -- hellos ------------------------------------------------------------------------------------

BAD_STARTS: dict[str, tuple[bytes, Reason]] = {
    "garbage": (b"\xff\x13\x37\xab" * 1000, Reason.BAD_MESSAGE),
    "bye first": (encode_frame({"kind": "bye"}), Reason.BAD_MESSAGE),
    "two hellos at once": (2 * encode_frame(raw_hello(engine_id="two")), Reason.BAD_MESSAGE),
    "one byte": (b"\x10", Reason.BAD_MESSAGE),
    "a length": (b"\x10\0\0\0", Reason.BAD_MESSAGE),
    "a cut hello": (encode_frame(raw_hello())[:-1], Reason.BAD_MESSAGE),
    "an unknown field": (encode_frame(raw_hello(surprise=1)), Reason.BAD_MESSAGE),
    "another protocol": (encode_frame(raw_hello(protocol=0)), Reason.PROTOCOL_VERSION),
    "no contract": (encode_frame(raw_hello(contract="{}")), Reason.BAD_CONTRACT),
}


def test_bad_starts(daemon: Daemon) -> None:
    bad = daemon.counters()["attach_frames_bad"]
    for data, reason in BAD_STARTS.values():
        with refused(daemon, reason), RawLine(attach_path(daemon)) as line:
            line.send(data)
            with contextlib.suppress(OSError):
                line.half_close()
            raise line.refusal()
    counted = sum(reason is Reason.BAD_MESSAGE for _, reason in BAD_STARTS.values())
    assert daemon.counters()["attach_frames_bad"] == bad + counted


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


def test_silence(hasty: Daemon) -> None:
    sent = (b"", b"\x10", encode_frame(raw_hello())[:-1])
    with contextlib.ExitStack() as lines:
        before = refusals(hasty, Reason.DEADLINE)
        silent = [lines.enter_context(RawLine(attach_path(hasty))) for _ in sent]
        for line, data in zip(silent, sent, strict=True):
            line.send(data)
        for line in silent:
            refusal = line.refusal()
            assert refusal.reason is Reason.DEADLINE
            assert f"{TIMEOUT_S} s" in refusal.message
    assert refusals(hasty, Reason.DEADLINE) == before + len(sent)


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


def test_descriptors_that_nobody_asked_for(daemon: Daemon) -> None:
    count = daemon.descriptor_count()
    with open(os.devnull) as file, refused(daemon, Reason.BAD_MESSAGE):
        line = RawLine(attach_path(daemon))
        with line:
            line.send(frame(b"hello"), [file.fileno()] * 10)
            raise line.refusal()
    until(lambda: daemon.descriptor_count() <= count, "none is left open")


def test_another_contract_under_the_same_name(daemon: Daemon) -> None:
    other = raw_contract(revision="other", kv_dtype="int8", tensor_parallel=2)
    with RawSession(daemon, engine_id="t"), refused(daemon, Reason.CONTRACT_MISMATCH) as caught:
        worker = {"engine_id": "t", "scheduler": False, "rank": 1}
        say(daemon, encode_frame(raw_hello(contract=other.to_json(), **worker)))
    assert caught.value.status.code is Code.FAILED_PRECONDITION
    fields = caught.value.details["fields"].split(",")
    assert fields == ["kv_dtype", "revision", "tensor_parallel"]
    assert "revision: 'other' here, 'r' there" in caught.value.message


# -- attach sockets ------------------------------------------------------------------------------

AFTER_WELCOME: dict[str, bytes] = {
    "a second hello": encode_frame(raw_hello()),
    "length of 4 GiB": struct.pack("<I", 0xFFFFFFFF),
    "not JSON": frame(b"hello"),
    "another kind": frame(b'{"kind":"ping"}'),
    "a list as kind": frame(b'{"kind":["bye"]}'),
    "more than a goodbye": struct.pack("<I", 200_000) + b"{" * 5000,
}


def test_bad_bytes_on_a_life_line_end_the_session(daemon: Daemon) -> None:
    for name, data in AFTER_WELCOME.items():
        session = RawSession(daemon, map_arena=True)
        with refused(daemon, Reason.BAD_MESSAGE):
            session.line.send(data)
            raise session.line.refusal()
        with refused(daemon, Reason.UNKNOWN_TOKEN):
            session.call("Heartbeat", pb.HeartbeatRequest())
        attached = [each.session for each in seats(daemon) if each.attached]
        assert session.welcome["session"] not in attached, name
        drop(daemon, session)


def test_half_a_frame_on_a_life_line_is_no_end(daemon: Daemon) -> None:
    with RawSession(daemon) as session:
        session.line.send(encode_frame({"kind": "bye"})[:-1])
        for _ in range(3):
            session.call("Heartbeat", pb.HeartbeatRequest())


# -- too many ------------------------------------------------------------------------------------


def test_hundreds_of_silent_connections(hasty: Daemon) -> None:
    count = hasty.descriptor_count()
    before = refusals(hasty, Reason.DEADLINE)
    with half_open(attach_path(hasty), 300) as lines:
        RawSession(hasty).close()
        assert hasty.descriptor_count() - count < 150
        assert all(line.refusal().reason is Reason.DEADLINE for line in lines)
    assert refusals(hasty, Reason.DEADLINE) == before + 300
    until(lambda: hasty.descriptor_count() <= count, "all descriptors are closed")


def test_out_of_descriptors_and_back(hasty: Daemon) -> None:
    count = hasty.descriptor_count()
    assert hasty.process is not None
    pid, what = hasty.process.pid, resource.RLIMIT_NOFILE
    old = resource.prlimit(pid, what)
    resource.prlimit(pid, what, (count + 20, old[1]))
    try:
        with half_open(attach_path(hasty), 60):
            RawSession(hasty).close()
    finally:
        resource.prlimit(pid, what, old)
    until(lambda: hasty.descriptor_count() <= count, "all descriptors are closed")
    assert "attach.cannot_accept" in hasty.log_text()


def long_contract(number: int) -> str:
    # An umlaut takes six bytes in the canonical form: 50 KiB of at most 64.
    return json.dumps(fat_contract(number, "\u00fc"))


def test_long_contracts_outlive_a_restart() -> None:
    with running_daemon(arena=True) as daemon:
        with engine_of(daemon.url(), contract_of(PAGE_BYTES), "ordinary") as engine:
            held = [RawSession(daemon, contract=long_contract(number)) for number in range(6)]
            daemon.restart()
            for session in held:
                session.close()
            with RawSession(daemon, contract=long_contract(0)) as again:
                assert again.welcome["namespace"] == held[0].welcome["namespace"]
            boot_id = daemon.stats().boot_id
            until(lambda: engine.client.boot_id == boot_id and engine.ready, "attached again")
            goes_on(engine)
        end_well(daemon)


# -- tenants ------------------------------------------------------------------------------------


@as_root
def test_a_user_of_no_tenant(daemon: Daemon) -> None:
    with refused(daemon, Reason.PEER_NOT_ALLOWED) as caught, as_user(daemon):
        for name in ("grpc.sock", "admin.sock"):
            with socket.socket(socket.AF_UNIX) as other, pytest.raises(PermissionError):
                other.connect(str(daemon.socket_dir / name))
        RawSession(daemon)
    assert f"user id {OTHER_UID}" in caught.value.message
    assert "allow_uids" in caught.value.message


@as_root
def test_tenants_share_nothing() -> None:
    """The same contract, engine id and keys under another user: a miss, and separate memory."""
    tenants = f"a=0:8MiB b={OTHER_UID}:8MiB"
    contract = contract_of(PAGE_BYTES)
    hello = {"engine_id": "same", "contract": contract.to_json(), "map_arena": True}
    with running_daemon(arena=False, tenants=tenants) as daemon:
        with engine_of(daemon.url(), contract, "same") as engine, contextlib.ExitStack() as held:
            keys = new_keys(3)
            assert len(engine.store(keys).bound) == 3
            mine = held.enter_context(RawSession(daemon, **{**hello, "engine_id": "mine"}))
            with as_user(daemon):
                theirs = held.enter_context(RawSession(daemon, **hello))
            assert theirs.welcome["namespace"] != mine.welcome["namespace"]
            ours, others = (os.fstat(one.line.descriptors[0]) for one in (mine, theirs))
            assert (ours.st_dev, ours.st_ino) != (others.st_dev, others.st_ino)
            with mmap.mmap(theirs.line.descriptors[0], 0, prot=mmap.PROT_READ) as seen:
                assert not seen[:].strip(bytes(1)), "another tenant's segment holds bytes of ours"
            assert mine.lookup(keys).groups[0].present == b"\x07"
            extents = mine.reserve(2)
            token, mine.token = mine.token, theirs.token
            found = mine.lookup(keys, lease_id=7)
            assert (found.groups[0].present, found.hit_tokens, found.lease_id) == (b"\0", 0, 0)
            for steal in (lambda: mine.commit(new_keys(2), extents), lambda: mine.abort(extents)):
                with refused(daemon, Reason.FOREIGN_EXTENT):
                    steal()
            mine.token = token
            assert mine.abort(extents).freed_slots == 2
        end_well(daemon)
