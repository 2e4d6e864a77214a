"""Bad input on the gRPC socket and the operators' of a real daemon: a status, a reason, a count.

``tests/unit/test_bad_messages.py`` has the requests that are wrong in themselves.
"""

from __future__ import annotations

import contextlib
import json
import random
import socket
import struct
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from support.daemon import Daemon, until
from support.raw_door import (
    PAGE_BYTES,
    RawSession,
    fat_contract,
    new_id,
    new_keys,
    raw_contract,
    refusals,
    refused,
    slots_of,
)

from kvhearth.contract import GroupKind, GroupSpec
from kvhearth.errors import Code, KVHearthError, Reason
from kvhearth.model import EXTENT_DTYPE
from kvhearth.proto.v1 import cache_pb2 as pb
from kvhearth.wire.frames import METHODS, error_from_code
from kvhearth_lab.harness import HUNG_S
from kvhearth_lab.harness.engine import Engine, contract_of

KEYS_MAX = 64
MESSAGE_BYTES_MAX = 64 << 10
SERVICE = "/kvhearth.proto.v1.CacheService"
DAEMON = {
    "memory": "32MiB",
    "slot_bytes_min": "4KiB",
    "keys_max": KEYS_MAX,
    "message_bytes_max": MESSAGE_BYTES_MAX,
}
pytestmark = pytest.mark.usefixtures("unhurt_neighbour")


# -- calls ---------------------------------------------------------------------------------------


def test_no_session(daemon: Daemon, session: RawSession) -> None:
    for token in ("", "0" * 64, "x"):
        with refused(daemon, Reason.UNKNOWN_TOKEN) as caught:
            session.call("Lookup", pb.LookupRequest(), token=token)
        assert caught.value.status.code is Code.UNAUTHENTICATED
        assert caught.value.details["boot_id"] == session.boot_id
    with refused(daemon, Reason.UNKNOWN_TOKEN):  # nothing is parsed for a stranger
        session.send_bytes(f"{SERVICE}/Lookup", b"\xff" * 40, (("kvhearth-token", "x"),))


def test_refusals_of_a_call_leave_the_session_alone(daemon: Daemon, session: RawSession) -> None:
    keys, extents = session.store(2)[0], session.reserve(2)
    before = refusals(daemon, Reason.BAD_MESSAGE)
    for method in METHODS:
        with pytest.raises(KVHearthError):
            session.send_bytes(f"{SERVICE}/{method}", b"\xff" * 40)
    assert refusals(daemon, Reason.BAD_MESSAGE) == before + len(METHODS)
    with refused(daemon, Reason.BAD_CHECKSUMS):
        session.commit(new_keys(2), extents, checksums=bytes(31))
    with refused(daemon, Reason.BAD_GROUP) as caught:
        session.send_bytes(f"{SERVICE}/Abort", b"\x0a\x00" * 20_000)
    assert "groups in one call" in caught.value.message, "counted before they are parsed"
    for path in (f"{SERVICE}/Explode", "/a/b", "/x"):
        with pytest.raises(grpc.RpcError) as unknown:
            session.channel.unary_unary(path)(b"", timeout=HUNG_S, metadata=session.metadata)
        assert unknown.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert session.lookup(keys).groups[0].present == b"\x03"
    assert session.abort(extents).freed_slots == 2


def test_too_long_a_message(session: RawSession) -> None:
    """gRPC itself rejects it; the client distinguishes it from overload by the error's text."""
    request = pb.HeartbeatRequest(counters={"x" * MESSAGE_BYTES_MAX: 1})
    call = session.channel.unary_unary(f"{SERVICE}/Heartbeat")
    with pytest.raises(grpc.RpcError) as caught:
        call(request.SerializeToString(), timeout=HUNG_S, metadata=session.metadata)
    code = caught.value.code().value[0]
    assert code == Code.RESOURCE_EXHAUSTED
    text = caught.value.details() or ""
    assert error_from_code(code, text).reason is Reason.BAD_MESSAGE
    session.call("Heartbeat", pb.HeartbeatRequest())


def test_no_answer_is_longer_than_a_message(daemon: Daemon) -> None:
    """Many shards make long answers, so a call takes fewer blocks; the welcome says how many."""
    ranks = 64
    group = GroupSpec(GroupKind.FULL, 16, 4096, shards=ranks)
    contract = raw_contract(groups=(group,), tensor_parallel=ranks).to_json()
    who = {"engine_id": "wide", "contract": contract}
    with contextlib.ExitStack() as members:
        scheduler = members.enter_context(RawSession(daemon, **who))
        for rank in range(1, ranks):
            members.enter_context(RawSession(daemon, **who, scheduler=False, rank=rank))
        most = scheduler.welcome["keys_max"]
        assert 1 < most < KEYS_MAX
        keys, extents = new_keys(most), scheduler.reserve(most)
        assert len(extents) == most * ranks
        scheduler.commit(keys, extents)
        assert scheduler.lookup(keys, lease_id=new_id()).hit_tokens == 16 * most
        with refused(daemon, Reason.TOO_MANY_KEYS):
            scheduler.reserve(most + 1)
        with refused(daemon, Reason.TOO_MANY_KEYS):
            scheduler.lookup([*keys, *new_keys(1)])


def test_a_dead_group(daemon: Daemon) -> None:
    """The group ends with its scheduler: for its worker too, with everything it held."""
    group = {"engine_id": "dead", "contract": raw_contract(tensor_parallel=2).to_json()}
    scheduler = RawSession(daemon, **group)
    with RawSession(daemon, **group, scheduler=False, rank=1) as worker:
        kept, _ = scheduler.store(2)
        extents = scheduler.reserve(2)
        assert scheduler.lookup(kept, lease_id=new_id()).lease_id
        ended = daemon.counters()["groups_ended"]
        scheduler.line.close()
        until(lambda: daemon.counters()["groups_ended"] > ended, "the group has ended")
        with refused(daemon, Reason.UNKNOWN_TOKEN):
            scheduler.commit(new_keys(2), extents)
        for call in (
            lambda: worker.call("Heartbeat", pb.HeartbeatRequest()),
            lambda: worker.commit(new_keys(2), extents),
        ):
            with refused(daemon, Reason.GROUP_GONE):
                call()
    scheduler.close(bye=False)
    with RawSession(daemon, **group) as again:
        assert again.welcome["incarnation"] == scheduler.welcome["incarnation"] + 1
        assert again.lookup(kept).groups[0].present == b"\x03"
        with refused(daemon, Reason.NOT_RESERVED):
            again.commit(new_keys(2), extents)


# -- reports of bad bytes ------------------------------------------------------------------------


def test_a_report_of_bad_bytes_survives_an_unknown_lease(
    daemon: Daemon, session: RawSession
) -> None:
    # The checksums of these blocks are zeros, which match no bytes.
    keys, extents = session.store(2)
    failures = daemon.counters().get("checksum_failures{reader}", 0)
    many = slots_of(np.repeat(extents[:1], KEYS_MAX))
    with refused(daemon, Reason.UNKNOWN_LEASE):
        session.call("Release", pb.ReleaseRequest(lease_ids=[3], bad=[many]))
    assert session.lookup(keys).groups[0].present == b"\x02"
    assert daemon.counters()["checksum_failures{reader}"] == failures + 1


def test_a_lie_about_bad_bytes_removes_nothing(daemon: Daemon, neighbour: Engine) -> None:
    keys = new_keys(2)
    assert len(neighbour.store(keys).bound) == 2
    with RawSession(daemon, contract=contract_of(PAGE_BYTES).to_json()) as liar:
        found = liar.lookup(keys, lease_id=new_id())
        extents = np.frombuffer(found.groups[0].extents, EXTENT_DTYPE)
        assert len(extents) == 2
        liar.call("Release", pb.ReleaseRequest(lease_ids=[found.lease_id], bad=[slots_of(extents)]))
    with RawSession(daemon, contract=raw_contract(model="foreign").to_json()) as stranger:
        stranger.call("Release", pb.ReleaseRequest(bad=[slots_of(extents)]))
    assert neighbour.check(keys).right == keys


# -- the door itself -----------------------------------------------------------------------------

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = b"\0\0\0\x04\0\0\0\0\0"
RAW_BYTES = (
    b"\xff\x13\x37\xab" * 5000,
    b"POST /kvhearth.proto.v1.CacheService/Lookup HTTP/1.1\r\nHost: x\r\n\r\n",
    PREFACE[:10],
    PREFACE + SETTINGS + b"\xff" * 5000,
    PREFACE + SETTINGS + b"\xff\xff\xff\0\0\0\0\0\x01",  # a frame of 16 MiB
    PREFACE + SETTINGS + b"\0\0\x04\x01\x04\0\0\0\x01\xff\xff\xff\xff",  # no headers
    PREFACE + SETTINGS + b"\0\0\x01\0\0\0\0\0\x07x",  # data without headers
    struct.pack("<I", 2) + b"{}",
    random.Random(7).randbytes(500),
)


def test_bytes_that_are_no_grpc(daemon: Daemon, session: RawSession) -> None:
    with contextlib.ExitStack() as open_lines:
        for data in RAW_BYTES:
            line = open_lines.enter_context(socket.socket(socket.AF_UNIX))
            line.connect(str(daemon.socket_dir / "grpc.sock"))
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                line.sendall(data)
        session.call("Heartbeat", pb.HeartbeatRequest())
        daemon.stats(check_books=True)


def test_health_and_reflection(session: RawSession) -> None:
    health = health_pb2_grpc.HealthStub(session.channel)
    for service in ("", "kvhearth.proto.v1.CacheService"):
        request = health_pb2.HealthCheckRequest(service=service)
        found = health.Check(request, timeout=HUNG_S)
        assert found.status == health_pb2.HealthCheckResponse.SERVING
    with pytest.raises(grpc.RpcError) as caught:
        health.Check(health_pb2.HealthCheckRequest(service="nothing"), timeout=HUNG_S)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    reflection = reflection_pb2_grpc.ServerReflectionStub(session.channel)
    asked = reflection_pb2.ServerReflectionRequest(list_services="")
    answers = list(reflection.ServerReflectionInfo(iter([asked]), timeout=HUNG_S))
    names = {each.name for each in answers[0].list_services_response.service}
    assert {"kvhearth.proto.v1.CacheService", "grpc.health.v1.Health"} <= names


# -- operators -----------------------------------------------------------------------------------


def test_operators_name_what_is_not_there(daemon: Daemon) -> None:
    operator = daemon.operator()
    reasons = {Reason.UNKNOWN_NAMESPACE, Reason.BAD_MESSAGE, Reason.NO_SUCH_PATH}
    for name in ("", "zz", "00", "0" * 64, "f" * 63, "0" * 10_000):
        with pytest.raises(KVHearthError) as caught:
            operator.evict(name, 0, None)
        assert caught.value.reason in reasons
        assert len(caught.value.message) <= 1024
    tiers: tuple[Any, ...] = ("tape", "", 7)
    for tier in tiers:
        with refused(daemon, Reason.BAD_MESSAGE):
            operator.evict("0" * 64, 0, tier)
    kind = json.loads(raw_contract().to_json())
    kind["groups"][0]["kind"] = "\U0001f525" * 10_000
    for text in ("{}", json.dumps(kind)):
        with refused(daemon, Reason.BAD_CONTRACT) as broken:
            operator.explain_contract("", text)
        assert len(broken.value.message) <= 1024
    found = operator.explain_contract("nobody", json.dumps(fat_contract(0, "a")))
    assert (found.exists, found.nearest) == (False, [])
