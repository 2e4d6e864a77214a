"""Contract tests of ``transports.base.CacheTransport``, run against every transport."""

from __future__ import annotations

import dataclasses
import os
import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.bridge import Bridge
from support.certificates import Authority
from support.fake_daemon import running, small_contract

from kvhearth.errors import KVHearthError, Reason
from kvhearth.proto.v1 import cache_pb2 as pb
from kvhearth.proto.v1 import types_pb2
from kvhearth.transports.base import HEARTBEAT, LOOKUP, CacheTransport
from kvhearth.transports.frames import over_unix
from kvhearth.transports.grpc_unix import GrpcUnixTransport
from kvhearth.transports.tcp import Dialer, over_tcp
from kvhearth.url import RemoteUrl
from kvhearth_lab.harness import HUNG_S

MakeTransport = Callable[[int], CacheTransport]


@pytest.fixture(params=["grpc", "frames", "tcp", "tls"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[MakeTransport]:
    """Makes transports to the daemon of the test's folder, by the bound of a message."""
    kind, bridge = request.param, None
    url = RemoteUrl("127.0.0.1")
    if kind in ("tcp", "tls"):
        context = None
        if kind == "tls":
            authority = Authority(tmp_path)
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            context.load_cert_chain(*authority.issue("gateway"))
            url = RemoteUrl("127.0.0.1", tls=True, ca=str(authority.path))
        bridge = Bridge(tmp_path / "calls.sock", context)

    def transport(message_bytes_max: int) -> CacheTransport:
        if kind == "grpc":
            return GrpcUnixTransport(f"unix:{tmp_path}/grpc.sock", "t", message_bytes_max)
        if bridge is None:
            return over_unix(f"{tmp_path}/calls.sock", "t", message_bytes_max)
        dialer = Dialer(dataclasses.replace(url, port=bridge.port))
        return over_tcp(dialer, url.place, "t", message_bytes_max)

    yield transport
    if bridge is not None:
        bridge.stop()


def test_the_transport_tells_refusals_silence_and_absence_apart(
    tmp_path: Path, make: MakeTransport
) -> None:
    transport = make(1 << 20)
    with running(tmp_path, small_contract()) as daemon:
        with pytest.raises(KVHearthError) as refusal:
            transport.call(HEARTBEAT, pb.HeartbeatRequest(), 5.0)
        assert refusal.value.reason is Reason.UNKNOWN_TOKEN
        daemon.tokens.append("t")
        assert transport.call(HEARTBEAT, pb.HeartbeatRequest(), 5.0).boot_id == daemon.boot_id
        daemon.refuse_next("Lookup", Reason.STALE_EPOCH)
        with pytest.raises(KVHearthError) as refusal:
            transport.call(LOOKUP, pb.LookupRequest(), 5.0)
        assert refusal.value.reason is Reason.STALE_EPOCH
        assert refusal.value.details == {"field": "x"}
        released = threading.Event()
        daemon.answer("Lookup", lambda _: released.wait(HUNG_S) and None)
        with pytest.raises(KVHearthError) as refusal:
            transport.call(LOOKUP, pb.LookupRequest(), 0.05)
        released.set()
        assert refusal.value.reason is Reason.DEADLINE
    with pytest.raises(KVHearthError) as refusal:
        transport.call(HEARTBEAT, pb.HeartbeatRequest(), 5.0)
    assert refusal.value.reason is Reason.DAEMON_AWAY
    transport.close()
    transport.close()
    with pytest.raises(KVHearthError) as refusal:
        transport.call(HEARTBEAT, pb.HeartbeatRequest(), 5.0)
    assert refusal.value.reason is Reason.CLOSED


def test_a_message_beyond_the_bound_is_refused(tmp_path: Path, make: MakeTransport) -> None:
    transport = make(64)
    with running(tmp_path, small_contract()) as daemon:
        daemon.tokens.append("t")
        request = pb.LookupRequest(groups=[types_pb2.GroupKeys(group=0, keys=b"x" * 1000)])
        with pytest.raises(KVHearthError) as refusal:
            transport.call(LOOKUP, request, 5.0)
        assert refusal.value.reason is Reason.BAD_MESSAGE
    transport.close()


def test_an_answer_stays_as_it_came(tmp_path: Path, make: MakeTransport) -> None:
    """The next answer on the same connection must not change it, whatever its size."""
    transport = make(1 << 20)
    sizes = [0, 1, 5000, 65_500, 65_536, 200_000, 3]
    with running(tmp_path, small_contract()) as daemon:
        daemon.tokens.append("t")
        answers = []
        for number, size in enumerate(sizes):
            group = pb.GroupPresence(group=number, extents=bytes([number]) * size)
            reply = pb.LookupResponse(groups=[group], lease_short=f"{number}" * 9)
            daemon.answer("Lookup", lambda _, reply=reply: reply)
            answers.append(transport.call(LOOKUP, pb.LookupRequest(), 5.0))
        for number, (size, answer) in enumerate(zip(sizes, answers, strict=True)):
            assert answer.lease_short == f"{number}" * 9
            assert answer.groups[0].extents == bytes([number]) * size
    transport.close()


def test_a_transport_of_frames_is_warm_with_an_idle_connection_only(
    tmp_path: Path, make: MakeTransport
) -> None:
    transport = make(1 << 20)
    warm = not isinstance(transport, GrpcUnixTransport)
    assert not transport.has_connection()
    with running(tmp_path, small_contract()) as daemon:
        daemon.tokens.append("t")
        transport.call(HEARTBEAT, pb.HeartbeatRequest(), 5.0)
        assert transport.has_connection() is warm
    with pytest.raises(KVHearthError) as refusal:
        transport.call(HEARTBEAT, pb.HeartbeatRequest(), 5.0)
    assert refusal.value.reason is Reason.DAEMON_AWAY
    assert not transport.has_connection()
    transport.close()


@pytest.mark.realtime("forks")
def test_a_forked_child_has_no_transport(tmp_path: Path, make: MakeTransport) -> None:
    transport = make(1 << 20)
    with running(tmp_path, small_contract()) as daemon:
        daemon.tokens.append("t")
        if not isinstance(transport, GrpcUnixTransport):  # gRPC's threads survive no fork
            transport.call(HEARTBEAT, pb.HeartbeatRequest(), 5.0)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                with pytest.raises(KVHearthError, match="closed"):
                    transport.call(HEARTBEAT, pb.HeartbeatRequest(), 5.0)
                transport.close()
                status = 0
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        assert transport.call(HEARTBEAT, pb.HeartbeatRequest(), 5.0).boot_id == daemon.boot_id
    transport.close()
