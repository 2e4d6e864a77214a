"""Attacks at every door: hostile bytes, idle connections, storms, slow readers, kills."""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import signal
import socket
import struct
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from kvhearth.contract import TEXT_CHARS_MAX, Contract
from kvhearth.errors import KVHearthError
from kvhearth.proto.v1 import cache_pb2, types_pb2
from kvhearth.session.link import Session, attach
from kvhearth.url import ATTACH_SOCKET, CALLS_SOCKET, parse_url
from kvhearth.version import PROTOCOL_VERSION
from kvhearth.wire import frames
from kvhearth.wire.handshake import FRAME_BYTES_MAX, HEALTH_QUESTION, Hello, encode_frame
from kvhearth_lab.harness.engine import PAGES, Engine, contract_of, key_of
from kvhearth_lab.hostile.attack import NOBODY, SECOND_UID, Attack, Target

HTTP, GATEWAY = "http", "gateway"
_WAIT_S = 0.5
_ANSWER_S = 10.0
_KEY_BYTES = 32
"""The preface of HTTP/2 and empty settings."""


def knock(target: Target, door: str) -> socket.socket:
    """Return a connection to a socket of the daemon, to ``HTTP`` or to ``GATEWAY``.

    Raises:
        OSError: nobody accepts it in time.
    """
    places = {HTTP: target.http, GATEWAY: target.gateway}
    line = socket.socket(socket.AF_INET if door in places else socket.AF_UNIX)
    line.settimeout(_WAIT_S)
    try:
        if door in places:
            host, _, port = places[door].rpartition(":")
            line.connect((host, int(port)))
        else:
            line.connect(str(Path(target.socket_dir) / door))
    except OSError:
        line.close()
        raise
    return line


def enter(
    target: Target, engine_id: str, *, made: Contract | None = None, map_arena: bool = False
) -> Session:
    """Attach as an engine of tenant a.

    Raises:
        KVHearthError: the daemon refuses.
    """
    hello = Hello(
        protocol=PROTOCOL_VERSION,
        engine_id=engine_id,
        contract=(made or contract_of(target.page_bytes, model="hostile")).to_json(),
        map_arena=map_arena,
        pid=os.getpid(),
    )
    return attach(parse_url(target.url), hello)


def opened(target: Target, session: Session) -> socket.socket:
    """Return a connection for the session's calls whose token is sent."""
    line = knock(target, CALLS_SOCKET)
    line.sendall(frame(frames.OPEN, session.welcome.token.encode()))
    return line


def frame(kind: int, body: bytes) -> bytes:
    """Return a frame of the calls socket."""
    return frames.HEADER.pack(len(body), kind, 1) + body


def lookup(session: Session, keys: bytes, lease_id: int = 0) -> bytes:
    """Return a frame that looks up keys and, with an id, leases the blocks."""
    group = types_pb2.GroupKeys(group=0, keys=keys)
    request = cache_pb2.LookupRequest(
        groups=[group], epoch=session.welcome.epoch, lease_id=lease_id
    )
    return frame(frames.METHODS["Lookup"], request.SerializeToString())


def random_keys(session: Session) -> bytes:
    """Return as many random keys as a call may have."""
    return os.urandom(session.welcome.keys_max * _KEY_BYTES)


def answer(line: socket.socket) -> bytes:
    """Return the body of the next frame.

    Raises:
        ConnectionResetError: the daemon closed the connection.
    """
    data = b""
    wanted = frames.HEADER.size
    while len(data) < wanted:
        more = line.recv(1 << 20)
        if not more:
            raise ConnectionResetError("the daemon closed it")
        data += more
        if len(data) >= frames.HEADER.size:
            wanted = frames.HEADER.size + frames.HEADER.unpack_from(data)[0]
    return data[frames.HEADER.size :]


# -- hostile bytes ---------------------------------------------------------------------------------


class RandomBytes(Attack):
    """Random bytes at a door, after the opening that its protocol expects or after none.

    One connection after another; making the bytes costs more than sending them, thus a short pause.
    """

    who = NOBODY
    pause_s = 0.001
    door: ClassVar[str] = ""
    opening: ClassVar[bytes] = b""

    def run(self, target: Target, number: int) -> Iterator[None]:
        rng = random.Random(number)
        while True:
            with contextlib.suppress(OSError), knock(target, self.door) as line:
                line.sendall(self.begin(rng))
                for _ in range(rng.randint(1, 4)):
                    line.sendall(self.words(rng))
                if rng.random() < 0.5:
                    line.shutdown(socket.SHUT_WR)
                    line.recv(4096)
            yield

    def begin(self, rng: random.Random) -> bytes:
        """Return the first bytes of a connection."""
        return self.opening if rng.random() < 0.7 else b""

    def words(self, rng: random.Random) -> bytes:
        """Return the next bytes of a connection."""
        return rng.randbytes(rng.choice((1, 7, 300, 9000, 60000)))


class RandomAttach(RandomBytes):
    """Random bytes, and JSON that is no hello, at the attach socket."""

    name = "random_attach"
    help = "nobody sends random bytes and wrong JSON to the attach socket"
    door = ATTACH_SOCKET

    def words(self, rng: random.Random) -> bytes:
        wrong = [{}, {"kind": "hello"}, {"kind": "hello", "protocol": -1}, {"kind": "bye"}]
        deep = b"[" * 60000
        if rng.random() < 0.5:
            return super().words(rng)
        body = rng.choice([json.dumps(rng.choice(wrong)).encode(), deep, b"{}" * 4000])
        return struct.pack("<I", len(body)) + body


class RandomFrames(RandomBytes):
    """Random bytes at the calls socket, by a peer without a token."""

    name = "random_frames"
    help = "nobody sends random bytes to the calls socket"
    door = CALLS_SOCKET
    opening = frame(frames.OPEN, b"no token")


class RandomHttp(RandomBytes):
    """Random bytes at HTTP, as a request's target, a header or a body."""

    name = "random_http"
    help = "nobody sends random bytes, targets, headers and bodies to HTTP"
    door = HTTP
    opening = b"POST /v1/namespaces/" + b"0" * 64 + b":evict HTTP/1.1\r\nHost: 127.0.0.1\r\n"

    def words(self, rng: random.Random) -> bytes:
        noise = super().words(rng)
        return rng.choice([noise, b"Content-Length: 50000\r\n\r\n" + noise, b"X: " + noise[:200]])


class RandomCalls(Attack):
    """Calls of a session with random bodies: right frames, right token, wrong messages."""

    name = "random_calls"
    help = "tenant a sends all calls with random bodies"
    pause_s = 0.001

    def run(self, target: Target, number: int) -> Iterator[None]:
        rng = random.Random(number)
        session = enter(target, f"random-{number}")
        while True:
            with contextlib.suppress(OSError), opened(target, session) as line:
                for _ in range(rng.randint(1, 20)):
                    kind = rng.choice([*frames.NAMES, 99])
                    line.sendall(frame(kind, rng.randbytes(rng.choice((0, 3, 40, 5000)))))
                    line.recv(65536)
                    yield
            yield


# -- idle and half-open connections ----------------------------------------------------------------


class Idle(Attack):
    """Many connections to a door; half of them silent, half of them stop within the first message.

    Those that the daemon closes are opened again, a portion a round; else it does nothing.
    """

    who = NOBODY
    pause_s = 0.02
    door: ClassVar[str] = ""
    half: ClassVar[bytes] = b""
    connections: ClassVar[int] = 1500
    portion: ClassVar[int] = 50

    def run(self, target: Target, number: int) -> Iterator[None]:
        held: dict[int, socket.socket] = {}
        closed = select.poll()
        while True:
            with contextlib.suppress(OSError):
                for _ in range(min(self.portion, self.connections - len(held))):
                    line = knock(target, self.door)
                    held[line.fileno()] = line
                    closed.register(line, select.POLLRDHUP)
                    line.sendall(self.half if len(held) % 2 else b"")
            for descriptor, _ in closed.poll(0):
                closed.unregister(descriptor)
                held.pop(descriptor).close()
            yield


class IdleAttach(Idle):
    """Connections to the attach socket that never say hello."""

    name = "idle_attach"
    help = "nobody holds 1,500 silent and half-open connections to the attach socket"
    door = ATTACH_SOCKET
    half = struct.pack("<I", 1000) + b"{"


class IdleFrames(Idle):
    """Connections to the calls socket that never give a token."""

    name = "idle_frames"
    help = "nobody holds 1,500 silent and half-open connections to the calls socket"
    door = CALLS_SOCKET
    half = frames.HEADER.pack(64, frames.OPEN, 0) + b"x"


class IdleHttp(Idle):
    """Connections to HTTP without a whole request."""

    name = "idle_http"
    help = "nobody holds 1,500 silent and half-open connections to HTTP"
    door = HTTP
    half = b"GET /livez HTTP/1.1\r\nHost: 127.0.0.1\r\nX: "


# -- storms ----------------------------------------------------------------------------------------


class AttachStorm(Attack):
    """Attaches with the arena's descriptors, half of which end without a word."""

    name = "attach_storm"
    help = "tenant a attaches and detaches at full speed, half of the time without a bye"
    processes = 2

    def run(self, target: Target, number: int) -> Iterator[None]:
        turn = 0
        while True:
            turn += 1
            with contextlib.suppress(KVHearthError):  # such as too_many_sessions
                session = enter(target, f"storm-{number}-{turn % 8}", map_arena=True)
                if turn % 2:
                    session.goodbye()
                else:
                    session.close()
            yield


class HealthStorm(Attack):
    """Questions for the daemon's health at the attach socket, which need no right."""

    name = "health_storm"
    help = "nobody asks the attach socket for the daemon's health at full speed"
    who = NOBODY
    processes = 2

    def run(self, target: Target, number: int) -> Iterator[None]:
        question = encode_frame(HEALTH_QUESTION)
        while True:
            with contextlib.suppress(OSError), knock(target, ATTACH_SOCKET) as line:
                line.sendall(question)
                line.recv(4096)
            yield


class BigHellos(Attack):
    """Hellos of the most bytes, which the daemon must parse before it can refuse them.

    The bytes are made once, and each connection waits for the refusal.
    """

    name = "big_hellos"
    help = "nobody sends hellos of 256 KiB, full of small objects, to the attach socket"
    who = NOBODY
    processes = 2

    def run(self, target: Target, number: int) -> Iterator[None]:
        room = FRAME_BYTES_MAX - 100
        body = b'{"kind":"hello","x":[' + b"{}," * (room // 3) + b"0]}"
        hello = struct.pack("<I", len(body)) + body
        while True:
            with contextlib.suppress(OSError), knock(target, ATTACH_SOCKET) as line:
                line.settimeout(_ANSWER_S)
                line.sendall(hello)
                line.recv(4096)
            yield


class BigContracts(Attack):
    """Attaches with ever new contracts of 40 KB, beside an arena whose catalogue must hold them."""

    name = "big_contracts"
    help = "tenant a attaches with ever new contracts of 40 KB, which the catalogue must hold"

    arena = True

    def run(self, target: Target, number: int) -> Iterator[None]:
        long = "\u00e9" * TEXT_CHARS_MAX
        texts = ("revision", "layout", "quantization", "hash_seed", "rope_digest", "draft_model")
        filled: dict[str, Any] = dict.fromkeys(texts, long)
        turn = 0
        while True:
            turn += 1
            named = f"{os.getpid()}-{turn}-{long}"[:TEXT_CHARS_MAX]
            made = replace(contract_of(target.page_bytes, model=named), **filled)
            with contextlib.suppress(KVHearthError):
                enter(target, f"contracts-{turn % 4}", made=made).goodbye()
            yield


class LookupStorm(Attack):
    """Lookups of the most keys that a call may have, on several connections of one session.

    The requests are made beforehand, and the process waits for answers, so that its own use of
    the processor is small beside the daemon's.
    """

    name = "lookup_storm"
    help = "tenant a looks up 8,192 random keys a call on 8 connections at full speed"
    connections: ClassVar[int] = 8
    requests: ClassVar[int] = 16

    def run(self, target: Target, number: int) -> Iterator[None]:
        session = enter(target, f"lookups-{number}")
        calls = [lookup(session, random_keys(session)) for _ in range(self.requests)]
        ready = select.poll()
        lines = {}
        for _ in range(self.connections):
            line = opened(target, session)
            line.settimeout(10)
            lines[line.fileno()] = line
            ready.register(line, select.POLLIN)
        turn = 0
        while True:
            for descriptor, _ in ready.poll():
                # Each chunk of an answer is taken for a whole one; some calls are thus pipelined.
                if not lines[descriptor].recv(1 << 20):
                    raise ConnectionResetError("the daemon closed it")
                turn += 1
                lines[descriptor].sendall(calls[turn % self.requests])
                yield


class EvictingStores(Attack):
    """Stores of ever new blocks, which evict the tenant's own.

    The daemon computes the checksums, since the blocks are committed without them.
    """

    name = "evicting_stores"
    help = "tenant a stores new blocks at full speed in an arena that is full"
    needs = frozenset({SECOND_UID})  # one tenant's blocks evict each other by right

    def run(self, target: Target, number: int) -> Iterator[None]:
        model = f"evicting-{os.getpid()}"
        contract = contract_of(target.page_bytes, model=model)
        engine = Engine(target.url, contract, model, key_of=partial(key_of, model))
        engine.wait_ready()
        first = 0
        while True:
            engine.store(range(first, first + PAGES), sums=False)
            first += PAGES
            yield


class SsdThrash(Attack):
    """Stores of more than the memory holds, and prefetches of what was evicted.

    The daemon has an SSD tier on the machine's temporary directory, whose speed takes part.
    """

    name = "ssd_thrash"
    help = "tenant a stores more than its memory and prefetches evicted blocks from the SSD tier"
    needs = frozenset({SECOND_UID})
    seconds_least = 4.0
    asked: ClassVar[int] = 1024

    def settings(self, folder: Path) -> Mapping[str, object]:
        return {"ssd_dirs": [f"{folder / 'ssd'}=1GiB"]}

    def run(self, target: Target, number: int) -> Iterator[None]:
        model = f"thrash-{os.getpid()}"
        contract = contract_of(target.page_bytes, model=model)
        engine = Engine(target.url, contract, model, key_of=partial(key_of, model))
        engine.wait_ready()
        rng = random.Random(number)
        first = 0
        while True:
            engine.store(range(first, first + PAGES))
            first += PAGES
            old = rng.randrange(first)
            keys = engine.keys(range(old, min(first, old + self.asked)))
            engine.client.prefetch({0: keys})
            yield


class ManyLeases(Attack):
    """As many leases as an engine may have, each of all blocks that a segment may hold."""

    name = "many_leases"
    help = "tenant a takes 4,096 leases of 2,048 blocks each, which the daemon must remember"
    needs = frozenset({SECOND_UID})
    seconds_least = 3.0
    blocks: ClassVar[int] = 2048

    def run(self, target: Target, number: int) -> Iterator[None]:
        model = f"leases-{os.getpid()}"
        contract = contract_of(target.page_bytes, model=model)
        engine = Engine(target.url, contract, model, key_of=partial(key_of, model))
        engine.wait_ready()
        for first in range(0, self.blocks, PAGES):
            engine.store(range(first, first + PAGES))
            yield
        session = enter(target, f"{model}-2", made=contract)
        keys = b"".join(engine.keys(range(self.blocks)))
        with opened(target, session) as line:
            line.settimeout(_ANSWER_S)
            answer(line)
            turn = 0
            while True:
                turn += 1
                line.sendall(lookup(session, keys, turn))
                answer(line)
                yield


class ManyPins(Attack):
    """Pins of absent blocks in ever new namespaces, several at once on a connection.

    Each pin lives for a day and costs the daemon memory, although it protects nothing.
    """

    name = "many_pins"
    help = "tenant a pins absent blocks for a day, 1,000 times in each of ever new namespaces"
    pins: ClassVar[int] = 1000
    at_once: ClassVar[int] = 50

    def run(self, target: Target, number: int) -> Iterator[None]:
        group = types_pb2.GroupKeys(group=0, keys=os.urandom(_KEY_BYTES))
        turn = 0
        while True:
            turn += 1
            made = contract_of(target.page_bytes, model=f"pins-{os.getpid()}-{turn}")
            session = enter(target, f"pins-{turn}", made=made)
            pins = [
                cache_pb2.PinRequest(
                    pin_id=each, groups=[group], epoch=session.welcome.epoch, ttl_ms=86_400_000
                )
                for each in range(1, 1 + self.pins)
            ]
            calls = [frame(frames.METHODS["Pin"], each.SerializeToString()) for each in pins]
            with opened(target, session) as line:
                line.settimeout(_ANSWER_S)
                for first in range(0, self.pins, self.at_once):
                    line.sendall(b"".join(calls[first : first + self.at_once]))
                    line.recv(1 << 20)
                    yield
                line.shutdown(socket.SHUT_WR)
                while line.recv(1 << 20):
                    pass
            session.goodbye()


# -- slow readers ----------------------------------------------------------------------------------


class SlowFrames(Attack):
    """Calls whose answers are never read, on as many connections as a session may have."""

    name = "slow_frames"
    help = "tenant a sends lookups on 60 connections and never reads an answer"
    pause_s = 0.005
    floods = True
    connections: ClassVar[int] = 60

    def run(self, target: Target, number: int) -> Iterator[None]:
        session = enter(target, f"slow-{number}")
        call = lookup(session, random_keys(session))
        yield from pushed(self.connections, partial(opened, target, session), call)


class SlowHttp(Attack):
    """Scrapes whose answers are never read."""

    name = "slow_http"
    help = "nobody asks for /metrics on 60 connections and never reads an answer"
    who = NOBODY
    pause_s = 0.005
    floods = True
    connections: ClassVar[int] = 60

    def run(self, target: Target, number: int) -> Iterator[None]:
        request = b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
        yield from pushed(self.connections, partial(knock, target, HTTP), request)


def pushed(count: int, open_line: partial[socket.socket], data: bytes) -> Iterator[None]:
    """Send ``data`` again and again on connections whose answers are not read; a connection that
    the daemon ends is replaced.
    """
    lines: list[socket.socket | None] = [None] * count
    rests: list[bytes] = [b""] * count
    while True:
        for place in range(count):
            try:
                line = lines[place]
                if line is None:
                    line = lines[place] = open_line()
                    line.setblocking(False)
                    rests[place] = b""
                rest = rests[place] or data
                rests[place] = rest[line.send(rest) :]
            except BlockingIOError:
                continue
            except OSError:
                broken, lines[place] = lines[place], None
                if broken is not None:
                    broken.close()
        yield


# -- kills -----------------------------------------------------------------------------------------


class KilledSessions(Attack):
    """Processes that attach, reserve, and are killed together."""

    name = "killed_sessions"
    help = "tenant a attaches 20 processes that reserve slots, and kills them with SIGKILL"
    children: ClassVar[int] = 20
    seconds_least = 3.0
    reserved: ClassVar[int] = 8

    def run(self, target: Target, number: int) -> Iterator[None]:
        while True:
            at_work, written = os.pipe()
            children = []
            for child in range(self.children):
                pid = os.fork()
                if not pid:
                    os.close(at_work)
                    self._live(target, child, written)
                children.append(pid)
            os.close(written)
            with os.fdopen(at_work, "rb") as heard:
                heard.read(self.children)
            for pid in children:
                os.kill(pid, signal.SIGKILL)
            for pid in children:
                os.waitpid(pid, 0)
            yield

    def _live(self, target: Target, child: int, written: int) -> None:
        """Attach and reserve in a child process, then wait for its end; never returns."""
        kept: list[object] = []
        try:
            session = enter(target, f"killed-{child}", map_arena=True)
            line = opened(target, session)
            kept += [session, line]
            counts = [types_pb2.GroupCount(group=0, count=self.reserved)]
            request = cache_pb2.ReserveRequest(
                reservation_id=1 + child, epoch=session.welcome.epoch, groups=counts
            )
            line.sendall(frame(frames.METHODS["Reserve"], request.SerializeToString()))
            line.recv(65536)
        except (OSError, KVHearthError):
            pass  # refused: the others go on
        finally:
            os.write(written, b"x")
            while True:
                signal.pause()
