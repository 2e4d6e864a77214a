"""Attacks over TCP on the gateway, by whoever reaches its port and by an identity of tenant a."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import struct
import time
from collections.abc import Iterator

import numpy as np

from kvhearth.errors import KVHearthError
from kvhearth.model import EXTENT_DTYPE, Records
from kvhearth.proto.v1 import cache_pb2, types_pb2
from kvhearth.session.link import Link, open_link
from kvhearth.transports.base import COMMIT, LOOKUP, RESERVE
from kvhearth.url import parse_url
from kvhearth.version import PROTOCOL_VERSION
from kvhearth.wire import frames
from kvhearth.wire.handshake import Hello, encode_frame
from kvhearth.wire.remote import PREFACE, DataFrame, DataKind, Identify, Purpose, preface
from kvhearth_lab.harness.engine import contract_of
from kvhearth_lab.hostile.attack import NOBODY, SECOND_UID, Attack, Target
from kvhearth_lab.hostile.attacks_general import GATEWAY, Idle, RandomBytes, knock

_CALL_S = 10.0
_BLOCKS = 8
_DRIP_S = 0.2


def enter(target: Target, engine_id: str) -> Link:
    """Attach through the gateway as an engine of tenant a.

    Raises:
        KVHearthError: it refuses.
    """
    hello = Hello(
        protocol=PROTOCOL_VERSION,
        engine_id=engine_id,
        contract=contract_of(target.page_bytes, model="hostile").to_json(),
        pid=os.getpid(),
    )
    url = f"kvhearth://{target.gateway}?token_file={target.token_file}&attach_ms=10000"
    return open_link(parse_url(url), hello)


def data_line(target: Target, link: Link) -> socket.socket:
    """Return a connection for bytes of a session."""
    line = knock(target, GATEWAY)
    line.settimeout(_CALL_S)
    token = link.welcome.token.encode()
    opening = DataFrame(DataKind.OPEN, 0, 0, len(token)).pack() + token
    line.sendall(preface(Purpose.DATA) + opening)
    return line


class Remote(Attack):
    """An attack on a gateway, whose sessions outlive a broken life line for 10 s."""

    needs = frozenset({SECOND_UID})
    gateway = True
    settle_s = 25.0


class RemoteRandom(Remote, RandomBytes):
    """Random bytes, without a preface, after one, and after the token of no session."""

    name = "remote_random"
    help = "nobody sends random bytes to the gateway, for all purposes of a connection"
    who = NOBODY
    door = GATEWAY
    openings = (
        b"",
        *(preface(purpose) for purpose in Purpose),
        PREFACE.pack(b"KVHG", 1, 99),
        preface(Purpose.LIFE_LINE) + encode_frame(Identify().to_message()),
        preface(Purpose.DATA) + DataFrame(DataKind.OPEN, 0, 0, 64).pack(),
    )

    def begin(self, rng: random.Random) -> bytes:
        return rng.choice(self.openings)


class RemoteIdle(Remote, Idle):
    """Many connections, silent or stopped within their first bytes; closed ones are replaced."""

    name = "remote_idle"
    help = "nobody holds 1,500 silent and half-open connections to the gateway"
    who = NOBODY
    door = GATEWAY
    half = preface(Purpose.LIFE_LINE) + struct.pack("<I", 1000) + b"{"


class RemoteTokens(Remote):
    """Guessed tokens of identities and of sessions, one connection after another."""

    name = "remote_tokens"
    help = "nobody guesses tokens at full speed"
    who = NOBODY
    processes = 2
    pause_s = 0.001

    def run(self, target: Target, number: int) -> Iterator[None]:
        rng = random.Random(number)
        while True:
            guess = rng.randbytes(20).hex()
            words = [
                preface(Purpose.LIFE_LINE) + encode_frame(Identify(guess).to_message()),
                preface(Purpose.LIFE_LINE) + encode_frame(Identify("", guess).to_message()),
                preface(Purpose.CALLS) + frames.encode(frames.OPEN, 0, guess.encode(), 256),
            ]
            with contextlib.suppress(OSError), knock(target, GATEWAY) as line:
                line.sendall(rng.choice(words))
                line.recv(4096)
            yield


class RemoteStorm(Remote):
    """Attaches over TCP, half of which end without a word."""

    name = "remote_storm"
    help = "tenant a attaches through the gateway at full speed, half of the time without a bye"
    processes = 2

    def run(self, target: Target, number: int) -> Iterator[None]:
        turn = 0
        while True:
            turn += 1
            with contextlib.suppress(KVHearthError):
                link = enter(target, f"storm-{os.getpid()}-{turn % 8}")
                if turn % 2:
                    link.close()
                else:
                    link.session.close()
                    link.transport.close()
            yield


class RemoteFrames(Remote):
    """Data frames of a session that break the protocol: foreign extents, wrong sizes, torn."""

    name = "remote_frames"
    help = "tenant a sends hostile data frames: foreign extents, wrong sizes, torn payloads"
    pause_s = 0.001

    def run(self, target: Target, number: int) -> Iterator[None]:
        rng = random.Random(number)
        link = enter(target, f"frames-{os.getpid()}")
        while True:
            with contextlib.suppress(OSError), data_line(target, link) as line:
                for _ in range(rng.randint(1, 8)):
                    line.sendall(self._words(rng, target.page_bytes))
                line.settimeout(0.05)
                line.recv(1 << 16)
            yield

    def _words(self, rng: random.Random, page_bytes: int) -> bytes:
        count = rng.choice((0, 1, 3, 5000))
        records = np.frombuffer(rng.randbytes(count * EXTENT_DTYPE.itemsize), EXTENT_DTYPE).copy()
        if rng.random() < 0.7:  # plausible ones, of slots that are not this engine's
            records["segment"], records["length"] = 0, page_bytes
            records["offset"] = records["slot"].astype(np.uint64) % 1024 * page_bytes
            records["generation"] %= 8
        size = rng.choice((0, count * page_bytes, 1 << 40, rng.randrange(1 << 20)))
        kind = rng.choice((DataKind.PUT, DataKind.GET, DataKind.STORED))
        payload = rng.randbytes(min(size, rng.choice((0, 100, 1 << 17))))
        return DataFrame(kind, count, rng.randrange(4), size).pack() + records.tobytes() + payload


class RemoteReplay(Remote):
    """Puts that are sent again: while their slots are reserved, and after they were committed."""

    name = "remote_replay"
    help = "tenant a replays puts before and after their commit, with other bytes"

    def run(self, target: Target, number: int) -> Iterator[None]:
        link = enter(target, f"replay-{os.getpid()}")
        while True:
            with contextlib.suppress(OSError), data_line(target, link) as line:
                extents = reserve(link)
                for turn in range(3):
                    put(line, extents, turn // 2, bytes([turn]) * target.page_bytes)
                commit(link, extents)
                put(line, extents, 7, b"\7" * target.page_bytes)
                line.recv(1 << 16)
            yield


class RemoteDrip(Remote):
    """Puts into reserved slots whose bytes come one by one, on many connections."""

    name = "remote_drip"
    help = "tenant a sends puts a byte at a time, and keeps slots and threads busy"
    pause_s = _DRIP_S

    def run(self, target: Target, number: int) -> Iterator[None]:
        link = enter(target, f"drip-{os.getpid()}")
        lines: list[socket.socket] = []
        with contextlib.suppress(OSError):
            while len(lines) < 16:
                line = data_line(target, link)
                lines.append(line)
                extents = reserve(link)
                put(line, extents, len(lines), b"")
        while lines:
            for line in tuple(lines):
                try:
                    line.send(b"x")
                except OSError:
                    lines.remove(line)
                    line.close()
            yield


class RemoteUnread(Remote):
    """Gets whose bytes are never read, on many connections."""

    name = "remote_unread"
    help = "tenant a asks for blocks and reads nothing"
    pause_s = 0.01

    def run(self, target: Target, number: int) -> Iterator[None]:
        link = enter(target, f"unread-{os.getpid()}")
        extents = reserve(link)
        with data_line(target, link) as line:
            put(line, extents, 1, os.urandom(target.page_bytes) * len(extents))
            line.recv(1 << 16)
        keys = commit(link, extents)
        lines: list[socket.socket] = []
        while True:
            leased = look_up(link, keys)
            with contextlib.suppress(OSError):
                line = data_line(target, link)
                line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                line.settimeout(0.05)
                lines.append(line)
                for turn in range(64):
                    get = DataFrame(DataKind.GET, len(leased), turn, 0).pack()
                    line.sendall(get + leased.tobytes())
            while len(lines) > 8:
                lines.pop(0).close()
            yield
            time.sleep(_DRIP_S)


def reserve(link: Link) -> Records:
    """Return reserved extents."""
    group = types_pb2.GroupCount(group=0, count=_BLOCKS)
    request = cache_pb2.ReserveRequest(
        groups=[group], epoch=link.welcome.epoch, reservation_id=random.getrandbits(60) + 1
    )
    reply = link.transport.call(RESERVE, request, _CALL_S)
    return np.frombuffer(reply.groups[0].extents, EXTENT_DTYPE)


def put(line: socket.socket, extents: Records, number: int, payload: bytes) -> None:
    """Send a put of as many blocks as ``payload`` has, or only the head of one of all blocks."""
    size = int(extents["length"][0])
    count = len(payload) // size or len(extents)
    head = DataFrame(DataKind.PUT, count, number, count * size).pack()
    line.sendall(head + extents[:count].tobytes() + payload)


def commit(link: Link, extents: Records) -> bytes:
    """Commit the extents without checksums; return the keys."""
    keys = os.urandom(32 * len(extents))
    group = cache_pb2.GroupCommit(
        group=0,
        keys=keys,
        slots=extents["slot"].tobytes(),
        generations=extents["generation"].tobytes(),
    )
    request = cache_pb2.CommitRequest(epoch=link.welcome.epoch, groups=[group])
    link.transport.call(COMMIT, request, _CALL_S)
    return keys


def look_up(link: Link, keys: bytes) -> Records:
    """Return leased extents of keys."""
    request = cache_pb2.LookupRequest(
        groups=[types_pb2.GroupKeys(group=0, keys=keys)],
        epoch=link.welcome.epoch,
        lease_id=random.getrandbits(60) + 1,
    )
    reply = link.transport.call(LOOKUP, request, _CALL_S)
    return np.frombuffer(reply.groups[0].extents, EXTENT_DTYPE)
