"""A scripted engine process that can also misbehave.

It speaks JSON lines on a socket (see ``puppet.Puppet``). It has no session manager: nothing is
released, drained or attached again unless a command says so.
"""

from __future__ import annotations

import gc
import json
import mmap
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from kvhearth.errors import KVHearthError
from kvhearth.model import EXTENT_DTYPE, Records
from kvhearth.proto.v1 import cache_pb2 as pb
from kvhearth.proto.v1 import types_pb2
from kvhearth.session.arena import ArenaMapping
from kvhearth.session.link import Session, attach
from kvhearth.transports import base
from kvhearth.transports.frames import FramesTransport, over_unix
from kvhearth.url import parse_url
from kvhearth.wire.handshake import Hello
from kvhearth_lab.harness import HUNG_S


class Member:
    """One attached process; every public method is a command."""

    def __init__(self, door: socket.socket) -> None:
        self._door = door
        self._session: Session | None = None
        self._arena: ArenaMapping | None = None
        self._transport: FramesTransport | None = None
        self._descriptors: list[int] = []
        self._scribbling = threading.Event()
        self._scribes: list[threading.Thread] = []

    def attach(self, url: str, keep_descriptors: bool, hello: dict[str, Any]) -> dict[str, Any]:
        """Attach and map."""
        address = parse_url(url)
        self._session = attach(address, Hello(**hello))
        welcome = self._session.welcome
        self._descriptors = self._session.take_descriptors()
        self._arena = ArenaMapping(welcome, self._descriptors, self._session.alive)
        if not keep_descriptors:
            self.close_descriptors()
        self._transport = over_unix(address.calls_path, welcome.token, 1 << 24)
        return {"boot_id": welcome.boot_id, "session": welcome.session, "epoch": welcome.epoch}

    def close_descriptors(self) -> None:
        """Close the descriptors, as a correct client does right after mapping."""
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors = []

    def heartbeat(self) -> bool:
        """Send a heartbeat. Return whether the group is complete."""
        return bool(self._call(base.HEARTBEAT, pb.HeartbeatRequest()).group_complete)

    def reserve(self, count: int, epoch: int) -> str:
        """Reserve blocks. Return extents of (count, shards), as hex; epoch 0 is the one of the
        welcome.
        """
        groups = [types_pb2.GroupCount(group=0, count=count)]
        request = pb.ReserveRequest(
            reservation_id=secrets.randbelow(1 << 62) + 1,
            epoch=epoch or self._session.welcome.epoch,
            groups=groups,
        )
        reply = self._call(base.RESERVE, request)
        return str(b"".join(part.extents for part in reply.groups).hex())

    def commit(self, keys: list[str], extents: str, epoch: int) -> int:
        """Commit without checksums. Return how many keys were bound."""
        records = _records(extents)
        request = pb.CommitRequest(
            epoch=epoch or self._session.welcome.epoch,
            groups=[
                pb.GroupCommit(
                    group=0,
                    keys=bytes.fromhex("".join(keys)),
                    slots=records["slot"].tobytes(),
                    generations=records["generation"].tobytes(),
                )
            ],
        )
        reply = self._call(base.COMMIT, request)
        return sum(bits.bit_count() for part in reply.stored for bits in part.bits)

    def abort(self, extents: str, in_doubt: bool) -> list[int]:
        """Abort slots. Return how many were freed and how many quarantined."""
        records = _records(extents)
        slots = types_pb2.GroupSlots(
            group=0,
            slots=records["slot"].tobytes(),
            generations=records["generation"].tobytes(),
        )
        reply = self._call(base.ABORT, pb.AbortRequest(groups=[slots], in_doubt=in_doubt))
        return [reply.freed_slots, reply.quarantined_slots]

    def write(self, extents: str, byte: int) -> None:
        """Fill extents once, without any check."""
        for view in self._views(extents):
            view[:] = byte

    def scribble(self, extents: str, byte: int) -> None:
        """Fill extents repeatedly, until ``rest``."""
        views = self._views(extents)

        def work() -> None:
            while not self._scribbling.is_set():
                for view in views:
                    view[:] = byte
                self._scribbling.wait(0.002)

        self._scribbling.clear()
        self._scribes.append(threading.Thread(target=work, daemon=True))
        self._scribes[-1].start()

    def rest(self) -> None:
        """End all scribbling."""
        self._scribbling.set()
        for scribe in self._scribes:
            scribe.join()
        self._scribes.clear()

    def alive(self) -> bool:
        """Return whether the attach socket is still open."""
        assert self._session is not None
        return self._session.alive()

    def unmap(self) -> None:
        """Unmap the arena."""
        self.rest()
        assert self._arena is not None
        self._arena.close()
        gc.collect()

    def goodbye(self) -> None:
        """Report that copies are done, whether they are or not."""
        assert self._session is not None
        self._session.goodbye()

    def hang_up(self) -> None:
        """Close the attach socket without a goodbye."""
        assert self._session is not None
        self._session.close()

    def fork(self, kind: str, extents: str = "", byte: int = 0) -> int:
        """Fork a child that lives on: ``plain``, ``descriptor`` (keeps an inherited one) or ``map``
        (maps it and scribbles on ``extents``). Return its pid.
        """
        parent = os.getppid()
        ready, reported = os.pipe()
        child = os.fork()
        if child:
            os.close(reported)
            os.read(ready, 1)
            os.close(ready)
            return child
        if kind == "plain":
            self.close_descriptors()
        views = self._child_views(extents) if kind == "map" else []
        self._door.close()
        os.write(reported, b"r")
        while _is_there(parent):
            for view in views:
                view[:] = byte
            time.sleep(0.005)
        os._exit(0)

    def _child_views(self, extents: str) -> list[Any]:
        assert self._session is not None
        size = self._session.welcome.segments[0].bytes
        memory = np.frombuffer(mmap.mmap(self._descriptors[0], size), np.uint8)
        # mmap keeps a duplicate of the descriptor, so this child holds the description twice.
        self.close_descriptors()
        return [_part(memory, record) for record in _records(extents)]

    def _views(self, extents: str) -> list[Any]:
        assert self._arena is not None
        records = _records(extents)
        return [_part(self._arena.view(int(one["segment"])), one) for one in records]

    def _call(self, rpc: Any, request: Any) -> Any:
        assert self._transport is not None
        return self._transport.call(rpc, request, HUNG_S)


def _records(text: str) -> Records:
    return np.frombuffer(bytes.fromhex(text), EXTENT_DTYPE)


def _part(memory: Any, record: Any) -> Any:
    start = int(record["offset"])
    return memory[start : start + int(record["length"])]


def _is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def serve(number: int) -> None:
    """Obey commands on the socket ``number`` until it ends."""
    door = socket.socket(fileno=number)
    member = Member(door)
    with door.makefile("r") as lines:
        for line in lines:
            command = json.loads(line)
            work: Callable[..., Any] = getattr(member, command.pop("do"))
            try:
                answer: dict[str, Any] = {"ok": work(**command)}
            except (KVHearthError, OSError, AssertionError) as error:
                reason = str(error.reason) if isinstance(error, KVHearthError) else repr(error)
                answer = {"error": reason, "why": str(error)}
            door.sendall((json.dumps(answer) + "\n").encode())
