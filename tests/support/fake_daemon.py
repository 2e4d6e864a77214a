"""A scripted daemon: real sockets, real descriptors, real gRPC, and answers written by the test."""

from __future__ import annotations

import array
import contextlib
import dataclasses
import mmap
import os
import secrets
import socket
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from kvhearth.contract import Contract, GroupKind, GroupSpec
from kvhearth.errors import KVHearthError, Reason
from kvhearth.model import EXTENT_DTYPE, pack_bits
from kvhearth.proto.v1 import cache_pb2 as pb
from kvhearth.wire.frames import STATUS_DETAILS_KEY, encode_status
from kvhearth.wire.handshake import FrameDecoder, Hello, SegmentInfo, Welcome, encode_frame, refused
from kvhearth_lab.harness import HUNG_S
from kvhearth_server.transport.rpc import cache_service
from support.fake_calls import FakeCalls, Listener

SEGMENT_BYTES = 64 * 1024
PAGE_BYTES = 4096
SLOTS = SEGMENT_BYTES // PAGE_BYTES
KEY_BYTES = 32

Answer = Callable[[Any], Any]


def small_contract(**changes: Any) -> Contract:
    """Return a contract of two groups: full attention with two shards, a window with one."""
    values: dict[str, Any] = {
        "model": "m",
        "revision": "r",
        "kv_dtype": "uint8",
        "hash_bytes": KEY_BYTES,
        "tensor_parallel": 2,
        "groups": (
            GroupSpec(GroupKind.FULL, 16, PAGE_BYTES, shards=2),
            GroupSpec(GroupKind.SLIDING_WINDOW, 16, PAGE_BYTES, window_tokens=32),
        ),
    }
    return Contract(**{**values, **changes})


def key(number: int) -> bytes:
    """A key."""
    return number.to_bytes(KEY_BYTES, "big")


def extents(count: int, first_slot: int = 0, generation: int = 1) -> np.ndarray[Any, Any]:
    """Return ``count`` extents of consecutive slots of segment 1."""
    records = np.zeros(count, EXTENT_DTYPE)
    records["slot"] = np.arange(first_slot, first_slot + count)
    records["segment"] = 1
    records["offset"] = records["slot"].astype(np.uint64) * PAGE_BYTES
    records["length"] = PAGE_BYTES
    records["generation"] = generation
    return records


class FakeDaemon:
    """A daemon whose calls are scripted with ``answer``; ``requests`` and ``hellos`` record its
    input.

    ``answers[rpc]`` is a queue of functions from request to reply; a ``KVHearthError`` that one
    raises is sent as its status. The default answer is an empty, correct one.
    """

    def __init__(self, directory: Path, contract: Contract, **welcome: Any) -> None:
        self.directory = directory
        self.contract = contract
        self.boot_id = secrets.token_hex(8)
        self.lineage = secrets.token_hex(8)
        self.epoch = 7
        self.group_complete = True
        self.refuse: KVHearthError | None = None
        self.silent_attach = False
        self.hellos: list[Hello] = []
        self.byes = 0
        self.ended = 0
        self.tokens: list[str] = []
        self.requests: dict[str, list[Any]] = defaultdict(list)
        self.answers: dict[str, deque[Answer]] = defaultdict(deque)
        self.welcome_changes = welcome
        self._changed = threading.Condition()
        self._memory = [_memfd("segment", SEGMENT_BYTES), _memfd("generations", SLOTS * 4)]
        self.segment = mmap.mmap(self._memory[0], SEGMENT_BYTES)
        self.generations = mmap.mmap(self._memory[1], SLOTS * 4)
        # Start now: a client calls as soon as it is attached.
        self._serve()
        self._attach = Listener(self.directory / "attach.sock", self._session)
        self.lines = self._attach.connections

    def _serve(self) -> None:
        (self.directory / "grpc.sock").unlink(missing_ok=True)
        self._threads = ThreadPoolExecutor(4)
        self._server = grpc.server(self._threads, options=[("grpc.so_reuseport", 0)])
        self._server.add_generic_rpc_handlers((cache_service(self._handler),))
        self._server.add_insecure_port(f"unix:{self.directory / 'grpc.sock'}")
        self._server.start()
        self._calls = FakeCalls(self.directory / "calls.sock", self.reply)

    def _handler(self, name: str) -> Callable[[Any, grpc.ServicerContext], Any]:
        def handle(data: bytes, context: grpc.ServicerContext) -> Any:
            request = getattr(pb, f"{name}Request").FromString(data)
            token = dict(context.invocation_metadata()).get("kvhearth-token", "")
            try:
                return self.reply(name, request, str(token))
            except KVHearthError as error:
                context.set_trailing_metadata([(STATUS_DETAILS_KEY, encode_status(error))])
                codes = {code.value[0]: code for code in grpc.StatusCode}
                context.abort(codes[int(error.status.code)], error.message)

        return handle

    def stop(self, *, keep_lines: bool = False) -> None:
        """Simulate the daemon's death: attach sockets close, socket files stay."""
        self._attach.refuse()
        if not keep_lines:
            self.drop_lines()
        self._server.stop(None).wait(HUNG_S)
        self._threads.shutdown()
        self._calls.stop()
        self._attach.join()
        self.segment.close()
        self.generations.close()
        for descriptor in self._memory:
            os.close(descriptor)
        self._memory = []

    def drop_lines(self) -> None:
        """End all sessions."""
        self._attach.drop()

    def reply(self, rpc: str, request: Any, token: str) -> Any:
        """Return the answer to ``rpc``, through whichever transport it came."""
        self.requests[rpc].append(request)
        if token not in self.tokens:
            raise KVHearthError(Reason.UNKNOWN_TOKEN, "attach anew")
        reply = self.answers[rpc].popleft()(request) if self.answers[rpc] else None
        reply = reply or self._default(rpc, request) or getattr(pb, f"{rpc}Response")()
        reply.boot_id = reply.boot_id or self.boot_id
        return reply

    def _default(self, rpc: str, request: Any) -> Any:
        if rpc == "Heartbeat":
            return pb.HeartbeatResponse(epoch=self.epoch, group_complete=self.group_complete)
        if rpc in ("Lookup", "Prefetch"):
            reply_type = getattr(pb, f"{rpc}Response")
            return reply_type(groups=[presence(group) for group in request.groups])
        if rpc == "Reserve":
            return pb.ReserveResponse(short_reason=str(Reason.NO_SPACE))
        if rpc == "BumpEpoch":
            self.epoch = request.expected_epoch + 1
            return pb.BumpEpochResponse(epoch=self.epoch)
        return None

    def answer(self, rpc: str, function: Answer) -> None:
        """Script the answer to the next ``rpc`` that has none yet."""
        self.answers[rpc].append(function)

    def refuse_next(self, rpc: str, reason: Reason) -> None:
        """Make the next ``rpc`` fail."""

        def fail(_: Any) -> Any:
            raise KVHearthError(reason, "as the test says", field="x")

        self.answer(rpc, fail)

    def _session(self, line: socket.socket) -> None:
        decoder = FrameDecoder()
        welcomed = False
        with line, contextlib.suppress(OSError):
            while data := line.recv(65536):
                for message in decoder.feed(data):
                    if message["kind"] == "bye":
                        self._count(byes=1)
                    elif not self.silent_attach:
                        welcomed = self._greet(line, Hello.from_message(message)) or welcomed
        self._count(ended=welcomed)

    def _count(self, *, byes: int = 0, ended: int = 0) -> None:
        with self._changed:
            self.byes += byes
            self.ended += ended
            self._changed.notify_all()

    def wait_counts(self, *, byes: int, ended: int) -> None:
        """Wait for so many goodbyes and ends of sessions since the start."""
        with self._changed:
            there = self._changed.wait_for(lambda: (self.byes, self.ended) == (byes, ended), HUNG_S)
        assert there, f"{self.byes} goodbyes, {self.ended} ends"

    def _greet(self, line: socket.socket, hello: Hello) -> bool:
        self.hellos.append(hello)
        if self.refuse is not None:
            line.sendall(encode_frame(refused(self.refuse)))
            return False
        token = secrets.token_hex(8)
        self.tokens.append(token)
        welcome = Welcome(
            boot_id=self.boot_id,
            session=len(self.hellos),
            token=token,
            incarnation=1,
            namespace="00",
            epoch=self.epoch,
            generation_count=SLOTS if hello.map_arena else 0,
            keys_max=64,
            message_bytes_max=1 << 20,
            leases_max=16,
            segments=[SegmentInfo(1, SEGMENT_BYTES, 4096)] if hello.map_arena else [],
            lineage=self.lineage,
        )
        welcome = dataclasses.replace(welcome, **self.welcome_changes)
        numbers = array.array("i", self._memory if hello.map_arena else [])
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, numbers)] if numbers else []
        frame = encode_frame(welcome.to_message())
        # Sent in two pieces: a client must not take one read for one frame.
        line.sendmsg([frame[:10]], ancillary)
        line.sendall(frame[10:])
        return True


def presence(
    group: Any, leased: int = 0, shards: int = 1, records: np.ndarray[Any, Any] | None = None
) -> pb.GroupPresence:
    """Return a presence in which the first ``leased`` keys of a group are in DRAM and leased, the
    others absent.
    """
    count = len(group.keys) // KEY_BYTES
    bits = np.arange(count) < leased
    if records is None:
        records = extents(leased * shards)
    return pb.GroupPresence(
        group=group.group,
        present=pack_bits(bits),
        ready=pack_bits(bits),
        leased=pack_bits(bits),
        tiers=bits.astype(np.uint8).tobytes(),
        extents=records.tobytes(),
    )


def _memfd(name: str, size: int) -> int:
    descriptor = os.memfd_create(name)
    os.ftruncate(descriptor, size)
    return descriptor


@contextlib.contextmanager
def running(directory: Path, contract: Contract, **welcome: Any) -> Iterator[FakeDaemon]:
    """Run a fake daemon for the length of a block."""
    daemon = FakeDaemon(directory, contract, **welcome)
    try:
        yield daemon
    finally:
        daemon.stop()
