"""Member processes that a test controls step by step; ``puppet_main`` has their commands."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from kvhearth import Contract
from kvhearth.model import EXTENT_DTYPE, Records
from kvhearth.version import PROTOCOL_VERSION
from kvhearth_lab.harness import HUNG_S
from support.daemon import until
from support.nursery import nursery


class PuppetError(Exception):
    """A command failed; ``reason`` is the domain error's, or Python's message."""

    def __init__(self, reason: str, why: str) -> None:
        super().__init__(why)
        self.reason = reason


class Puppet:
    """One process. Kill it, stop it, or call its commands."""

    def __init__(self) -> None:
        self._door, theirs = socket.socketpair()
        with theirs:
            self._process = nursery().birth("support.puppet_main:serve", [theirs.fileno()])
        self._door.settimeout(HUNG_S)
        self._lines = self._door.makefile("r")
        self.session = 0
        self.boot_id = ""
        self.children: list[int] = []

    @property
    def pid(self) -> int:
        """ID of the process."""
        return self._process.pid

    def do(self, command: str, **arguments: Any) -> Any:
        """Call a command and return its answer.

        Raises:
            PuppetError: the command failed.
        """
        self._door.sendall((json.dumps({"do": command, **arguments}) + "\n").encode())
        answer = json.loads(self._lines.readline() or '{"error": "ended", "why": ""}')
        if "error" in answer:
            raise PuppetError(answer["error"], answer["why"])
        return answer["ok"]

    def attach(
        self,
        url: str,
        contract: Contract,
        *,
        engine_id: str = "victim",
        rank: int = 0,
        keep_descriptors: bool = False,
        **hello: Any,
    ) -> None:
        """Attach; rank 0 is the scheduler, too."""
        values = {
            "protocol": PROTOCOL_VERSION,
            "engine_id": engine_id,
            "contract": contract.to_json(),
            "scheduler": rank == 0,
            "rank": rank,
            **hello,
        }
        found = self.do("attach", url=url, keep_descriptors=keep_descriptors, hello=values)
        self.session, self.boot_id = found["session"], found["boot_id"]

    def reserve(self, count: int, epoch: int = 0) -> Records:
        """Reserve blocks. Return their extents, flat, block by block."""
        data = bytes.fromhex(self.do("reserve", count=count, epoch=epoch))
        return np.frombuffer(data, EXTENT_DTYPE)

    def commit(self, keys: list[bytes], extents: Records, epoch: int = 0) -> int:
        """Commit without checksums. Return how many keys were bound."""
        texts = [key.hex() for key in keys]
        return int(self.do("commit", keys=texts, extents=_hex(extents), epoch=epoch))

    def abort(self, extents: Records, *, in_doubt: bool) -> tuple[int, int]:
        """Abort slots. Return how many were freed and how many quarantined."""
        freed, quarantined = self.do("abort", extents=_hex(extents), in_doubt=in_doubt)
        return freed, quarantined

    def write(self, extents: Records, byte: int) -> None:
        """Fill extents once, without any check."""
        self.do("write", extents=_hex(extents), byte=byte)

    def scribble(self, extents: Records, byte: int) -> None:
        """Fill extents repeatedly."""
        self.do("scribble", extents=_hex(extents), byte=byte)

    def fork(self, kind: str, extents: Records | None = None, byte: int = 0) -> int:
        """Fork a child of the process; see ``Member.fork``."""
        text = "" if extents is None else _hex(extents)
        self.children.append(self.do("fork", kind=kind, extents=text, byte=byte))
        return self.children[-1]

    def stop(self) -> None:
        """Send SIGSTOP, and wait until the process is stopped."""
        self._process.send_signal(signal.SIGSTOP)
        status = Path(f"/proc/{self.pid}/stat")
        until(lambda: status.read_text().rpartition(")")[2].split()[0] == "T", "it stands still")

    def go_on(self) -> None:
        """Send SIGCONT."""
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Kill the process with SIGKILL, not its children, and wait for its end."""
        self._process.kill()
        self._process.wait()
        self._lines.close()
        self._door.close()

    def kill_children(self) -> None:
        """Kill the processes that it forked with SIGKILL."""
        for child in self.children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        self.children.clear()


def _hex(extents: Records) -> str:
    return np.ascontiguousarray(extents).tobytes().hex()


@contextlib.contextmanager
def puppets(count: int) -> Iterator[list[Puppet]]:
    """Yield processes that start in parallel, and kill them at the end with all that they
    forked.
    """
    every = [Puppet() for _ in range(count)]
    try:
        yield every
    finally:
        for one in every:
            one.kill_children()
            one.kill()
