"""Malformed bytes, unauthorized operator calls, and a flood of both, on a real daemon."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from support.daemon import Daemon
from support.raw_door import (
    CALL_S,
    RawLine,
    RawSession,
    attach_path,
    fat_contract,
    goes_on,
    raw_contract,
    refusals,
    refused,
)

from kvhearth.errors import KVHearthError, Reason
from kvhearth.proto.v1 import cache_pb2
from kvhearth.proto.v1 import cache_pb2 as pb
from kvhearth_lab.harness.engine import Engine

CACHE_METHODS = list(cache_pb2.DESCRIPTOR.services_by_name["CacheService"].methods_by_name)
PATHS = [f"/kvhearth.proto.v1.CacheService/{name}" for name in CACHE_METHODS]


DAEMON = {"message_bytes_max": "64KiB"}
pytestmark = pytest.mark.usefixtures("unhurt_neighbour")


# -- bytes ---------------------------------------------------------------------------------------


def payloads() -> Iterator[bytes]:
    """Bytes that parse as no method's message, or only as some methods'."""
    chance = random.Random(7)
    yield b"\xff" * 40
    yield b"\x0a\xff\xff\xff\xff\x0f"
    yield b"\x0a\x80\x80\x80\x80\x80\x80\x80\x80\x80\x80\x01"
    yield b"\x0b" * 5000
    yield b"\x12\x00" * 30_000
    for size in (1, 2, 3, 5, 8, 13, 50, 500, 5000):
        yield chance.randbytes(size)


@pytest.mark.parametrize("path", PATHS)
def test_bytes_that_are_no_message(daemon: Daemon, session: RawSession, path: str) -> None:
    before = refusals(daemon, Reason.BAD_MESSAGE)
    for payload in payloads():
        with contextlib.suppress(Exception):
            session.send_bytes(path, payload, session.metadata)
    assert refusals(daemon, Reason.BAD_MESSAGE) > before
    assert refusals(daemon, Reason.INTERNAL) == 0


def test_nothing_is_parsed_for_a_stranger(daemon: Daemon, session: RawSession) -> None:
    with refused(daemon, Reason.UNKNOWN_TOKEN):
        session.send_bytes(PATHS[0], b"\xff" * 40, (("kvhearth-token", "x"),))


@pytest.mark.parametrize("path", ["/kvhearth.proto.v1.CacheService/Explode", "/a/b", "/x"])
def test_a_method_that_is_not_there(session: RawSession, path: str) -> None:
    call = session.channel.unary_unary(path)
    with pytest.raises(grpc.RpcError) as caught:
        call(b"", timeout=CALL_S, metadata=session.metadata)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = b"\0\0\0\x04\0\0\0\0\0"

RAW_BYTES = {
    "garbage": b"\xff\x13\x37\xab" * 5000,
    "http 1": b"POST /kvhearth.proto.v1.CacheService/Lookup HTTP/1.1\r\nHost: x\r\n\r\n",
    "half a preface": PREFACE[:10],
    "garbage after the preface": PREFACE + SETTINGS + b"\xff" * 5000,
    "a frame of 16 MiB": PREFACE + SETTINGS + b"\xff\xff\xff\0\0\0\0\0\x01",
    "headers that are none": PREFACE + SETTINGS + b"\0\0\x04\x01\x04\0\0\0\x01\xff\xff\xff\xff",
    "data without headers": PREFACE + SETTINGS + b"\0\0\x01\0\0\0\0\0\x07x",
    "an attach frame": struct.pack("<I", 2) + b"{}",
}


@pytest.mark.parametrize("name", RAW_BYTES)
def test_bytes_that_are_no_grpc(daemon: Daemon, session: RawSession, name: str) -> None:
    with contextlib.ExitStack() as open_lines:
        for _ in range(10):
            line = open_lines.enter_context(socket.socket(socket.AF_UNIX))
            line.connect(str(daemon.socket_dir / "grpc.sock"))
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                line.sendall(RAW_BYTES[name])
        session.call("Heartbeat", pb.HeartbeatRequest())
        daemon.stats(check_books=True)


# -- operators -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", "zz", "00", "0" * 64, "f" * 63, "0" * 10_000])
def test_evict_of_nothing(daemon: Daemon, name: str) -> None:
    with pytest.raises(KVHearthError) as caught:
        daemon.operator().evict(name, 0, None)
    reasons = {Reason.UNKNOWN_NAMESPACE, Reason.BAD_MESSAGE, Reason.NO_SUCH_PATH}
    assert caught.value.reason in reasons
    assert len(caught.value.message) <= 1024


@pytest.mark.parametrize("tier", ["tape", "", 7])
def test_evict_from_nowhere(daemon: Daemon, tier: Any) -> None:
    with refused(daemon, Reason.BAD_MESSAGE):
        daemon.operator().evict("0" * 64, 0, tier)


def test_explain_of_a_broken_contract(daemon: Daemon) -> None:
    kind = json.loads(raw_contract().to_json())
    kind["groups"][0]["kind"] = "\U0001f525" * 10_000
    for text in ("{}", json.dumps(kind)):
        with refused(daemon, Reason.BAD_CONTRACT) as caught:
            daemon.operator().explain_contract("", text)
        assert len(caught.value.message) <= 1024


def test_a_contract_with_half_a_character(daemon: Daemon) -> None:
    """JSON can name half of a surrogate pair."""
    text = raw_contract(model="half").to_json().replace('"half"', '"\\ud800"')
    with refused(daemon, Reason.BAD_CONTRACT), RawSession(daemon, contract=text):
        pass


def test_explain_of_the_longest_contract(daemon: Daemon) -> None:
    found = daemon.operator().explain_contract("nobody", json.dumps(fat_contract(0, "a")))
    assert (found.exists, found.nearest) == (False, [])


def test_health_and_reflection(session: RawSession) -> None:
    health = health_pb2_grpc.HealthStub(session.channel)
    for service in ("", "kvhearth.proto.v1.CacheService"):
        request = health_pb2.HealthCheckRequest(service=service)
        assert (
            health.Check(request, timeout=CALL_S).status == health_pb2.HealthCheckResponse.SERVING
        )
    with pytest.raises(grpc.RpcError) as caught:
        health.Check(health_pb2.HealthCheckRequest(service="nothing"), timeout=CALL_S)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    reflection = reflection_pb2_grpc.ServerReflectionStub(session.channel)
    asked = reflection_pb2.ServerReflectionRequest(list_services="")
    answers = list(reflection.ServerReflectionInfo(iter([asked]), timeout=CALL_S))
    names = {each.name for each in answers[0].list_services_response.service}
    assert {"kvhearth.proto.v1.CacheService", "grpc.health.v1.Health"} <= names


# -- everything at once --------------------------------------------------------------------------


def test_a_flood_of_bad_input(daemon: Daemon, session: RawSession, neighbour: Engine) -> None:
    """While four peers send only bad input, every call of a good one is served."""
    over = threading.Event()
    counts = [0, 0]

    def attach_badly() -> None:
        while not over.is_set():
            with RawLine(attach_path(daemon)) as line:
                line.send(b"\xff" * 100)
                line.ended()
                counts[0] += 1

    def call_badly() -> None:
        request = pb.LookupRequest(groups=[{"keys": bytes(33)}])
        while not over.is_set():
            with contextlib.suppress(KVHearthError):
                session.call("Lookup", request)
            counts[1] += 1

    peers = [threading.Thread(target=work) for work in (attach_badly, call_badly) * 2]
    for peer in peers:
        peer.start()
    try:
        end = time.monotonic() + 1.0
        while time.monotonic() < end:
            goes_on(neighbour)
    finally:
        over.set()
        for peer in peers:
            peer.join()
    assert min(counts) > 10
