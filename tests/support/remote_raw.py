"""A gateway process for tests, and a client of it that is made of raw sockets."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import ssl
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvhearth.contract import Contract
from kvhearth.errors import KVHearthError
from kvhearth.model import EXTENT_DTYPE, FLAG_SUMMED, Records, checksum_of
from kvhearth.proto.v1 import cache_pb2 as pb
from kvhearth.proto.v1 import types_pb2
from kvhearth.wire import frames
from kvhearth.wire.handshake import FrameDecoder, Hello, Welcome, encode_frame
from kvhearth.wire.remote import (
    DATA_HEADER,
    RECORD_BYTES,
    DataFrame,
    DataKind,
    GatewayTerms,
    Identify,
    Outcome,
    Purpose,
    preface,
)
from kvhearth_lab.harness import HUNG_S
from kvhearth_lab.harness.engine import contract_of
from support.daemon import until

PAGE_BYTES = 64 << 10
CONTRACT = contract_of(PAGE_BYTES)


class GatewayProcess:
    """``kvhearth gateway`` for a daemon."""

    def __init__(self, socket_dir: Path, *flags: str) -> None:
        command = [sys.executable, "-m", "kvhearth_server", "gateway"]
        command += ["--socket-dir", str(socket_dir)]
        command += ["--listen", "127.0.0.1:0", "--log-format", "json", *flags]
        self.log = Path(socket_dir).parent / "gateway.log"
        begun = self.log.stat().st_size if self.log.exists() else 0
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=log)
        until(
            lambda: self.process.poll() is not None or self.serving(begun),
            "the gateway serves",
        )
        assert self.process.poll() is None, self.log.read_text()
        (first, *_) = self.serving(begun)
        self.port: int = first["port"]

    def serving(self, begun: int = 0) -> list[dict[str, Any]]:
        """Return the log's lines of processes that serve, from a place in the log on."""
        return self.events("gateway.serving", begun)

    @property
    def child(self) -> int:
        """Process id of the process that serves."""
        pid: int = self.serving()[-1]["pid"]
        return pid

    def events(self, name: str, begun: int = 0) -> list[dict[str, Any]]:
        """Return the log's lines of one event."""
        text = self.log.read_text()[begun:]
        lines = [json.loads(each) for each in text.splitlines(True) if each[-2:] == "}\n"]
        return [each for each in lines if each.get("event") == name]

    def end(self, number: int = signal.SIGTERM) -> None:
        """Send a signal and wait for the end."""
        self.process.send_signal(number)
        self.process.wait(HUNG_S)


@contextlib.contextmanager
def gateway(socket_dir: Path, *flags: str) -> Iterator[GatewayProcess]:
    """Run a gateway during the block; its log may not have a bug's traceback."""
    process = GatewayProcess(socket_dir, *flags)
    try:
        yield process
    except BaseException:
        print(process.log.read_text()[-6000:])
        raise
    finally:
        if process.process.poll() is None:
            process.end()
    assert "Traceback" not in process.log.read_text(), process.log.read_text()[-6000:]


_opened: list[socket.socket] = []


def connect(port: int, tls: ssl.SSLContext | None = None) -> socket.socket:
    """Return a connection to a gateway, which ``close_all`` closes."""
    _opened.append(socket.create_connection(("127.0.0.1", port), HUNG_S))
    if tls is not None:
        _opened[-1] = tls.wrap_socket(_opened[-1], server_hostname="localhost")
    return _opened[-1]


def close_all() -> None:
    """Close all connections."""
    while _opened:
        _opened.pop().close()


def receive(connection: socket.socket, size: int) -> bytes:
    """Return exactly ``size`` bytes."""
    data = b""
    while len(data) < size:
        more = connection.recv(size - len(data))
        if not more:
            raise ConnectionResetError(f"ended after {len(data)} of {size} bytes")
        data += more
    return data


def message(connection: socket.socket) -> dict[str, Any]:
    """Return the next JSON frame."""
    head = receive(connection, 4)
    (size,) = struct.unpack("<I", head)
    (found,) = FrameDecoder().feed(head + receive(connection, size))
    return found


def hello_of(contract: Contract = CONTRACT, **fields: Any) -> Hello:
    """Return the hello of an engine with one rank."""
    return Hello(1, **{"engine_id": "far", "contract": contract.to_json(), **fields})


class RawSession:
    """A life line, connections for calls and data, and requests by hand."""

    def __init__(
        self,
        port: int,
        hello: Hello | None = None,
        *,
        secret: str = "",
        resume: str = "",
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._tls = tls
        self._number = 0
        self.port = port
        self.line = connect(port, tls)
        identify = Identify(secret, resume).to_message()
        self.line.sendall(preface(Purpose.LIFE_LINE) + encode_frame(identify))
        if resume:
            self._check(message(self.line))
            return
        self.line.sendall(encode_frame((hello or hello_of()).to_message()))
        first = message(self.line)
        self._check(first)
        self.terms = GatewayTerms.from_message(first)
        second = message(self.line)
        self._check(second)
        self.welcome = Welcome.from_message(second)
        self.calls = self.open_calls(self.welcome.token)
        self.data = self.open_data(self.welcome.token)

    def _check(self, found: dict[str, Any]) -> None:
        if found["kind"] == "refused":
            self.line.close()
            raise frames.rebuild_error(found["reason"], found["message"], found["details"])

    def open_calls(self, token: str) -> socket.socket:
        """Return a connection for calls, whose opening was answered."""
        connection = connect(self.port, self._tls)
        connection.sendall(
            preface(Purpose.CALLS) + frames.encode(frames.OPEN, 0, token.encode(), 512)
        )
        kind, body = self.reply(connection)
        if kind == frames.REFUSED:
            connection.close()
            raise frames.decode_status(body)
        return connection

    def open_data(self, token: str) -> socket.socket:
        """Return a connection for data."""
        connection = connect(self.port, self._tls)
        header = DataFrame(DataKind.OPEN, 0, 0, len(token)).pack()
        connection.sendall(preface(Purpose.DATA) + header + token.encode())
        return connection

    def reply(self, connection: socket.socket) -> tuple[int, bytes]:
        """Return the kind and body of the next answer to a call."""
        size, kind, _ = frames.HEADER.unpack(receive(connection, frames.HEADER.size))
        return kind, receive(connection, size)

    def call(self, name: str, request: Any, connection: socket.socket | None = None) -> Any:
        """Make a call; return the parsed reply, or raise its refusal."""
        connection = connection or self.calls
        connection.sendall(
            frames.encode(frames.METHODS[name], 7, request.SerializeToString(), 1 << 30)
        )
        kind, body = self.reply(connection)
        if kind == frames.REFUSED:
            raise frames.decode_status(body)
        return getattr(pb, f"{name}Response").FromString(body)

    # -- an engine's calls -------------------------------------------------------------------------

    def reserve(self, count: int) -> Records:
        """Return reserved extents."""
        request = pb.ReserveRequest(
            reservation_id=1 + secrets.randbits(60),
            epoch=self.welcome.epoch,
            groups=[types_pb2.GroupCount(group=0, count=count)],
        )
        reply = self.call("Reserve", request)
        return np.frombuffer(bytearray(reply.groups[0].extents), EXTENT_DTYPE)

    def commit(
        self, keys: Sequence[bytes], extents: Records, *, sums: bool = True
    ) -> pb.CommitResponse:
        """Commit blocks, by the checksums of their extents or by the daemon's."""
        group = pb.GroupCommit(
            group=0,
            keys=b"".join(keys),
            slots=extents["slot"].tobytes(),
            generations=extents["generation"].tobytes(),
            checksums=extents["checksum"].tobytes() if sums else b"",
        )
        reply: pb.CommitResponse = self.call(
            "Commit", pb.CommitRequest(epoch=self.welcome.epoch, groups=[group])
        )
        return reply

    def abort(self, extents: Records, *, in_doubt: bool = False) -> pb.AbortResponse:
        """Give slots back."""
        group = types_pb2.GroupSlots(
            group=0, slots=extents["slot"].tobytes(), generations=extents["generation"].tobytes()
        )
        reply: pb.AbortResponse = self.call(
            "Abort", pb.AbortRequest(groups=[group], in_doubt=in_doubt)
        )
        return reply

    def look_up(self, keys: Sequence[bytes], lease: int = 0) -> tuple[int, Records]:
        """Return a lease and its extents."""
        lease = lease or 1 + secrets.randbits(60)
        request = pb.LookupRequest(
            epoch=self.welcome.epoch,
            lease_id=lease,
            groups=[types_pb2.GroupKeys(group=0, keys=b"".join(keys))],
        )
        reply = self.call("Lookup", request)
        return lease, np.frombuffer(bytearray(reply.groups[0].extents), EXTENT_DTYPE)

    def release(self, *leases: int) -> None:
        """End leases."""
        self.call("Release", pb.ReleaseRequest(lease_ids=leases))

    # -- data --------------------------------------------------------------------------------------

    def number(self) -> int:
        """Return the next request's number."""
        self._number += 1
        return self._number

    def put_frame(self, extents: Records, payload: bytes) -> bytes:
        """Return the bytes of a put."""
        frame = DataFrame(DataKind.PUT, len(extents), self.number(), len(payload))
        return frame.pack() + extents.tobytes() + payload

    def put(self, extents: Records, payload: bytes) -> list[Outcome]:
        """Store and return the outcomes."""
        self.data.sendall(self.put_frame(extents, payload))
        kind, outcomes, _ = self.answer()
        assert kind is DataKind.STORED
        return outcomes

    def get(self, extents: Records) -> tuple[list[Outcome], bytes, list[Outcome]]:
        """Load; return the outcomes before and after, and the bytes."""
        frame = DataFrame(DataKind.GET, len(extents), self.number(), 0)
        self.data.sendall(frame.pack() + extents.tobytes())
        first, before, payload = self.answer()
        second, after, _ = self.answer()
        assert (first, second) == (DataKind.BYTES, DataKind.COPIED)
        return before, payload, after

    def answer(
        self, connection: socket.socket | None = None
    ) -> tuple[DataKind, list[Outcome], bytes]:
        """Return kind, outcomes and payload of the next data frame; raises a refusal."""
        connection = connection or self.data
        frame = DataFrame.unpack(receive(connection, DATA_HEADER.size))
        records = receive(connection, frame.count * RECORD_BYTES[frame.kind])
        payload = receive(connection, frame.payload_bytes)
        if frame.kind is DataKind.REFUSED:
            raise frames.decode_status(payload)
        return frame.kind, [Outcome(each) for each in records], payload

    def store(self, keys: Sequence[bytes]) -> bytes:
        """Store blocks of random bytes, and return these."""
        extents = self.reserve(len(keys))
        payload = os.urandom(len(keys) * PAGE_BYTES)
        assert set(self.put(summed(extents, payload), payload)) == {Outcome.OK}
        assert self.commit(keys, extents).stored[0].bits
        return payload

    def bye(self) -> None:
        """Say that all transfers are done, and close."""
        with contextlib.suppress(OSError):
            self.line.sendall(encode_frame({"kind": "bye"}))
        self.close()

    def close(self) -> None:
        """Close all connections without a word."""
        for each in (self.calls, self.data, self.line):
            each.close()


def summed(extents: Records, payload: bytes) -> Records:
    """Set the checksums of extents to those of their bytes; returns ``extents``."""
    extents["flags"] = FLAG_SUMMED
    for at in range(len(extents)):
        page = payload[at * PAGE_BYTES : (at + 1) * PAGE_BYTES]
        extents["checksum"][at] = np.void(checksum_of(page))
    return extents


def refusal_of(action: Any) -> str:
    """Return the reason with which ``action()`` is refused."""
    try:
        action()
    except KVHearthError as error:
        return str(error.reason)
    raise AssertionError("not refused")


def keys_of(count: int) -> list[bytes]:
    """Return random keys."""
    return [secrets.token_bytes(CONTRACT.hash_bytes) for _ in range(count)]
