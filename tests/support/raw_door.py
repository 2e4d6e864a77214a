"""Both doors of the daemon spoken to by hand: frames on the attach socket, stubs without a client."""

from __future__ import annotations

import array
import contextlib
import os
import secrets
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from support.daemon import Daemon

from kvhearth.contract import Contract, GroupKind, GroupSpec
from kvhearth.errors import KVHearthError, Reason
from kvhearth.model import EXTENT_DTYPE, Records
from kvhearth.proto.v1 import cache_pb2 as pb
from kvhearth.proto.v1 import cache_pb2_grpc
from kvhearth.proto.v1.types_pb2 import GroupCount
from kvhearth.statuses import STATUS_DETAILS_KEY, decode_status
from kvhearth.transports.base import TOKEN_KEY
from kvhearth.url import ATTACH_SOCKET, GRPC_SOCKET
from kvhearth.version import PROTOCOL_VERSION
from kvhearth.wire import FrameDecoder, encode_frame

CALL_S = 5.0
PAGE_BYTES = 64 * 1024


def raw_contract(**changes: Any) -> Contract:
    """A contract of one group and one rank."""
    groups = (GroupSpec(GroupKind.FULL, 16, PAGE_BYTES),)
    return Contract(
        **{"model": "m", "revision": "r", "kv_dtype": "uint8", "groups": groups, **changes}
    )


def raw_hello(**changes: Any) -> dict[str, Any]:
    """A good hello's message, but for the changes."""
    message = {
        "kind": "hello",
        "protocol": PROTOCOL_VERSION,
        "engine_id": f"e-{secrets.token_hex(4)}",
        "contract": raw_contract().to_json(),
        "scheduler": True,
        "rank": 0,
        "map_arena": False,
    }
    return {name: value for name, value in {**message, **changes}.items() if value is not ...}


class RawLine:
    """A connection to the attach socket."""

    def __init__(self, path: str, timeout_s: float = CALL_S) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        # A connect with a timeout would fail at once while the daemon's backlog is full.
        self._socket.connect(path)
        self._socket.settimeout(timeout_s)
        self.descriptors: list[int] = []

    def __enter__(self) -> RawLine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Hang up, and close the descriptors that came."""
        self._socket.close()
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors = []

    def send(self, data: bytes) -> None:
        """Bytes as they are; a daemon that has hung up already is no failure here."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._socket.sendall(data)

    def half_close(self) -> None:
        """No more bytes will come from here."""
        self._socket.shutdown(socket.SHUT_WR)

    def answer(self) -> dict[str, Any]:
        """The next frame."""
        decoder = FrameDecoder()
        while True:
            data, ancillary, _, _ = self._socket.recvmsg(1 << 16, socket.CMSG_SPACE(64))
            for _, _, payload in ancillary:
                numbers = array.array("i")
                numbers.frombytes(payload)
                self.descriptors += numbers
            assert data, "the daemon hung up without a word"
            if messages := decoder.feed(data):
                return messages[0]

    def ended(self) -> bool:
        """Whether the daemon hangs up, waiting for it as long as the timeout says."""
        try:
            while self._socket.recv(1 << 16):
                pass
        except ConnectionResetError:
            return True
        except TimeoutError:
            return False
        return True


def say(path: str, data: bytes) -> dict[str, Any]:
    """What the daemon answers to bytes, after which it must hang up if it refused them."""
    with RawLine(path) as line:
        line.send(data)
        answer = line.answer()
        assert answer["kind"] == "welcome" or line.ended()
        return answer


def say_hello(path: str, **changes: Any) -> dict[str, Any]:
    """What the daemon answers to a hello with changes."""
    return say(path, encode_frame(raw_hello(**changes)))


class RawSession:
    """An attached session: its life line, and calls with its token."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        self.line = RawLine(str(folder / ATTACH_SOCKET))
        self.line.send(encode_frame(raw_hello(**changes)))
        self.welcome = self.line.answer()
        assert self.welcome["kind"] == "welcome", self.welcome
        self.token = str(self.welcome["token"])
        self.epoch = int(self.welcome["epoch"])
        self.boot_id = str(self.welcome["boot_id"])
        self.channel = grpc.insecure_channel(
            f"unix:{folder / GRPC_SOCKET}", options=[("grpc.use_local_subchannel_pool", 1)]
        )
        self._stub = cache_pb2_grpc.CacheServiceStub(self.channel)

    def __enter__(self) -> RawSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self, *, bye: bool = True) -> None:
        """End the session, with a goodbye or without."""
        if bye:
            self.line.send(encode_frame({"kind": "bye"}))
        self.line.close()
        self.channel.close()

    def call(self, method: str, request: Any, *, token: str | None = None) -> Any:
        """One call; ``token``: another one than the session's, empty for none.

        Raises:
            KVHearthError: the refusal.
        """
        token = self.token if token is None else token
        metadata = ((TOKEN_KEY, token),) if token else ()
        try:
            return getattr(self._stub, method)(request, timeout=CALL_S, metadata=metadata)
        except grpc.RpcError as error:
            raise refusal_of(error) from None

    def reserve(self, count: int, *, group: int = 0, **changes: Any) -> Records:
        """Reserved extents, flat, of one group."""
        fields = {"reservation_id": new_id(), "epoch": self.epoch, **changes}
        wants = [GroupCount(group=group, count=count)]
        reply = self.call("Reserve", pb.ReserveRequest(**fields, groups=wants))
        data = reply.groups[0].extents if reply.groups else b""
        return np.frombuffer(data, EXTENT_DTYPE)

    def commit(self, keys: list[bytes], extents: Records, **changes: Any) -> pb.CommitResponse:
        """Bind keys to reserved extents."""
        group = pb.GroupCommit(
            **{
                "keys": b"".join(keys),
                "slots": extents["slot"].tobytes(),
                "generations": extents["generation"].tobytes(),
                "checksums": bytes(16 * len(extents)),
                **changes,
            }
        )
        reply: pb.CommitResponse = self.call(
            "Commit", pb.CommitRequest(epoch=self.epoch, groups=[group])
        )
        return reply


def refusal_of(error: grpc.RpcError) -> KVHearthError:
    """The reason that a failed call carries; the code on the wire must be that reason's."""
    for key, value in error.trailing_metadata() or ():
        if key == STATUS_DETAILS_KEY:
            refusal = decode_status(value)
            assert error.code().value[0] == int(refusal.status.code)
            assert error.details()
            return refusal
    raise AssertionError(f"a status without a reason: {error.code()} {error.details()}")


def new_id() -> int:
    """A number for a lease, a reservation or a pin."""
    return 1 + secrets.randbelow((1 << 63) - 2)


def new_keys(count: int, key_bytes: int = 32) -> list[bytes]:
    """Keys that nobody has."""
    return [os.urandom(key_bytes) for _ in range(count)]


@contextlib.contextmanager
def half_open(path: str, count: int) -> Iterator[list[RawLine]]:
    """Connections that say nothing."""
    lines: list[RawLine] = []
    try:
        for _ in range(count):
            lines.append(RawLine(path))
        yield lines
    finally:
        for line in lines:
            line.close()


def refusals(daemon: Daemon, reason: str) -> int:
    """How often the daemon has refused something for ``reason``."""
    return daemon.counters().get(f"refusals{{{reason}}}", 0)


@contextlib.contextmanager
def refused_once(daemon: Daemon, reason: Reason, times: int = 1) -> Iterator[None]:
    """The block makes the daemon count ``times`` refusals of this reason, and the books balance."""
    before = refusals(daemon, reason)
    yield
    assert refusals(daemon, reason) == before + times
    daemon.stats(check_books=True)


def end_well(daemon: Daemon) -> None:
    """Nothing is held any more, no task and no call ended in a bug, and the daemon ends with 0."""
    daemon.wait_quiet()
    counters = daemon.counters()
    assert not [name for name in counters if name.startswith("task_failures{")], daemon.log_tail()
    assert "refusals{internal}" not in counters, daemon.log_tail()
    assert daemon.terminate() == 0, daemon.log_tail()
    for sign in ("Traceback", "never retrieved"):
        assert sign not in daemon.log_text(), daemon.log_tail()


def seconds_of(work: Any) -> float:
    """How long a call takes."""
    started = time.monotonic()
    work()
    return time.monotonic() - started
