"""A daemon with a watched loop: ``python -m kvhearth_lab.bench.stalls.watched_daemon``.

It is the real daemon, except that its slots are smaller than a page, so that millions of them fit
into this machine's memory. The loop's longest call and the lateness of a 1 ms timer on it go into a
small shared file, which the bench reads from another process.
"""

from __future__ import annotations

import asyncio
import gc
import mmap
import os
import struct
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import CoroutineType
from typing import Any

from kvhearth_lab.bench.stalls.figures import SLAB_BYTES, SLOT_BYTES
from kvhearth_server.config.load import load_settings
from kvhearth_server.core.slot_table import Geometry
from kvhearth_server.memory.mapping import HugepagePolicy
from kvhearth_server.memory.plan import ArenaPlan
from kvhearth_server.observability import logs

TIMER_S = 0.001
_FORM = struct.Struct("<dd96s")
"""Longest call and greatest lateness, both in seconds; the name of the longest call."""


@dataclass(frozen=True)
class Longest:
    """Maxima since the last ``take``, in milliseconds, and the name of the longest call."""

    call_cpu_ms: float
    timer_late_ms: float
    name: str


class WatchFile:
    """The file that a watched process and the bench share."""

    def __init__(self, path: Path) -> None:
        """Open ``path``; create the file if it is missing."""
        with path.open("a+b") as file:
            file.truncate(_FORM.size)
            self._map = mmap.mmap(file.fileno(), _FORM.size)

    def take(self) -> Longest:
        """Return the maxima since the last call, and reset them."""
        call_s, late_s, name = _FORM.unpack(self._map[:])
        self._map[:] = bytes(_FORM.size)
        shown = name.rstrip(b"\0").decode(errors="replace")
        return Longest(round(call_s * 1e3, 3), round(late_s * 1e3, 3), shown)

    def note_call(self, seconds: float, name: Callable[[], str]) -> None:
        """Record the call if it is the longest."""
        longest, late, _ = _FORM.unpack(self._map[:])
        if seconds > longest:
            self._map[:] = _FORM.pack(seconds, late, name().encode()[:96])

    def note_late(self, seconds: float) -> None:
        """Record the timer's lateness if it is the greatest."""
        longest, late, name = _FORM.unpack(self._map[:])
        if seconds > late:
            self._map[:] = _FORM.pack(longest, seconds, name)


class LoopWatch:
    """Times every callback of every event loop of this process, from ``install`` on.

    A callback's time is processor time of the loop's thread: garbage collection and page faults
    count, other threads and processes do not.
    """

    def __init__(self, file: WatchFile) -> None:
        self._file = file
        self._timers: set[asyncio.AbstractEventLoop] = set()
        self._collections = 0

    def install(self) -> None:
        """Wrap ``Handle._run``, through which asyncio runs every callback, in a clock."""
        run = asyncio.Handle._run
        note, clock = self._file.note_call, time.thread_time

        def timed(handle: asyncio.Handle) -> None:
            found = _coroutine_of(handle) or handle._callback  # type: ignore[attr-defined]
            collections = self._collections
            began = clock()
            run(handle)
            took = clock() - began
            collected = self._collections > collections
            note(took, lambda: _name_of(found) + " and gc" * collected)
            self._begin_timer(handle)

        gc.callbacks.append(self._collected)
        asyncio.Handle._run = timed  # type: ignore[assignment, method-assign]

    def _collected(self, phase: str, _: dict[str, int]) -> None:
        self._collections += phase == "stop"

    def _begin_timer(self, handle: asyncio.Handle) -> None:
        loop: asyncio.AbstractEventLoop = handle._loop  # type: ignore[attr-defined]
        if loop not in self._timers:
            self._timers.add(loop)
            self._tick(loop, loop.time())

    def _tick(self, loop: asyncio.AbstractEventLoop, due: float) -> None:
        now = loop.time()
        self._file.note_late(now - due)
        loop.call_at(now + TIMER_S, self._tick, loop, now + TIMER_S)


def _coroutine_of(handle: asyncio.Handle) -> Any:
    """Return the coroutine of the task whose step this is; None for a plain callback."""
    owner = getattr(handle._callback, "__self__", None)  # type: ignore[attr-defined]
    return owner.get_coro() if isinstance(owner, asyncio.Task) else None


def _name_of(found: Any) -> str:
    """Return a name for people: the callback, or the task's innermost coroutine."""
    while isinstance(inner := getattr(found, "cr_await", None), CoroutineType):
        found = inner
    return str(getattr(found, "__qualname__", found))


def main(watch: str, slabs: str, *flags: str) -> int:
    """Serve until SIGTERM.

    Args:
        watch: file for the loop's times.
        slabs: size of the arena.
        flags: flags of ``kvhearth serve``, each followed by its value.
    """
    names = [flag.removeprefix("--").replace("-", "_") for flag in flags[::2]]
    settings = load_settings(dict(zip(names, flags[1::2], strict=True)))
    logs.configure(settings.log_level, settings.log_format)
    tenant = settings.effective_tenants(os.getuid())[0].name
    geometry = Geometry.of([(tenant, int(slabs) * SLAB_BYTES)], SLAB_BYTES, SLOT_BYTES)
    LoopWatch(WatchFile(Path(watch))).install()
    # Imported after the settings and the watch, as in the command: this loads gRPC.
    from kvhearth_server import daemon

    return daemon.run(settings, ArenaPlan(geometry, None, HugepagePolicy.OFF))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
