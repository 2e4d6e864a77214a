"""Traces one store and one lookup: ``python -m support.hops FOLDER ARENA``.

The daemon runs on this process's main thread, a scripted engine on another, and
``sys.setprofile`` sees every function of ours that is entered. Definitions:

- *Turn*: what a thread does from one entry into our code to its return. In a loop that was entered
  before the trace began, each call that the loop makes is a turn.
- *Path*: all turns that differ from every turn of an idle engine and daemon, which step, poll and
  send heartbeats meanwhile.
- *File*: a module of which the path enters a function, including its helpers.
- *Hop*: the control passes from one module to another on the path; each pair of modules counts
  once, and a return does not count. Code of other packages between two modules is skipped.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import kvhearth
import kvhearth_server
from support.daemon import until
from support.scripted_engine import ScriptedEngine, scripted_engine

Call = tuple[str, str, str]
"""Calling module ("" for a thread's or a loop's own), called module, called function."""

ROOTS = {str(Path(one.__path__[0])): one.__name__ for one in (kvhearth, kvhearth_server)}
SETTINGS = {
    "memory": "16MiB",
    "slab_bytes": "2MiB",
    "slot_bytes_min": "16KiB",
    "hugepages": "off",
    "http": "off",
    "scrub_rate": "0",
    "log_level": "error",
    "ssd_segment_bytes": "2MiB",
}
TOKENS = 64
REPEATS = 6
IDLE_S = 2.0
QUIET_S = 0.3
"""A path has ended when it had no turn for this long."""


@dataclass
class _Thread:
    """Stack of a thread's modules within its current turn, and the turn's calls by their number."""

    modules: list[str] = field(default_factory=list)
    calls: dict[Call, int] = field(default_factory=dict)


class Tracer:
    """Collects turns while ``record`` runs.

    Attributes:
        idle: turns of an idle engine and daemon.
        turns: turns of the path that is being recorded.
    """

    def __init__(self) -> None:
        self.idle: set[frozenset[Call]] = set()
        self.turns: list[dict[Call, int]] = []
        self._window = 0
        self._numbers = itertools.count()
        self._ended_at = 0.0
        self._names: dict[str, str] = {}
        self._local = threading.local()
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)

    def learn_idle(self, act: Callable[[], None]) -> None:
        """Record what happens during ``act`` as idle."""
        self._begin()
        act()
        self._window += 1
        self.idle |= {frozenset(one) for one in self.turns}

    def record(self, act: Callable[[], None]) -> list[dict[Call, int]]:
        """Run ``act``, wait for the end of the path that it began, and return the path's turns."""
        self._begin()
        act()
        until(lambda: time.monotonic() - self._ended_at >= QUIET_S, "the path ends")
        self._window += 1
        return self.turns

    def _begin(self) -> None:
        self.turns = []
        self._ended_at = time.monotonic()
        self._window += 1

    def _profile(self, frame: FrameType, event: str, _: object) -> None:
        if self._window % 2 == 0 or event not in ("call", "return"):
            return
        module = self._module(frame)
        if not module:
            return
        own = self._own()
        if event == "call":
            function = frame.f_code.co_name
            caller = own.modules[-1] if own.modules else ""
            if not function.startswith("<"):
                own.calls.setdefault((caller, module, function), next(self._numbers))
            own.modules.append(module)
        elif own.modules:
            own.modules.pop()
            if not own.modules:
                self._end_turn(own)

    def _end_turn(self, own: _Thread) -> None:
        if own.calls and frozenset(own.calls) not in self.idle:
            self.turns.append(own.calls)
            self._ended_at = time.monotonic()
        own.calls = {}

    def _own(self) -> _Thread:
        if getattr(self._local, "window", 0) != self._window:
            self._local.window, self._local.thread = self._window, _Thread()
        found: _Thread = self._local.thread
        return found

    def _module(self, frame: FrameType) -> str:
        path = frame.f_code.co_filename
        if path not in self._names:
            self._names[path] = ""
            for root, name in ROOTS.items():
                if path.startswith(root + os.sep) and "_pb2" not in path:
                    self._names[path] = name + path[len(root) :].removesuffix(".py")
        return self._names[path]


def condensed(turns: list[dict[Call, int]]) -> dict[str, list[object]]:
    """Return a path's files, its hops, and the modules in the order in which they are entered."""
    numbered = sorted((number, call) for turn in turns for call, number in turn.items())
    calls = [call for _, call in numbered]
    hops = {(caller, module) for caller, module, _ in calls if caller not in ("", module)}
    return {
        "files": sorted({module for _, module, _ in calls}),
        "hops": sorted(map(list, hops)),
        "entries": [module for _, module, _ in calls],
    }


def trace(engine: ScriptedEngine, tracer: Tracer) -> dict[str, list[dict[str, list[object]]]]:
    """Trace stores of prompts and loads of the same prompts, after a first one has warmed all
    up.
    """
    for _ in range(2):
        engine.run("first", "first", TOKENS)
    time.sleep(QUIET_S)

    def idle() -> None:
        end = time.monotonic() + IDLE_S
        while time.monotonic() < end:
            engine.step({})
            time.sleep(0.01)

    tracer.learn_idle(idle)
    stores, lookups = [], []
    for number in range(REPEATS):
        text = f"text {number}"
        request = engine.add(text, text, TOKENS)
        assert engine.admit(request) == 0
        time.sleep(QUIET_S)

        def store(request=request) -> None:
            engine.prefill(request)
            engine.settle()

        stores.append(condensed(tracer.record(store)))
        engine.finish(request)
        time.sleep(QUIET_S)

        def lookup(text=text) -> None:
            again = engine.add(text, text, TOKENS)
            assert engine.admit(again) == TOKENS
            assert engine.wait_loaded(again)

        lookups.append(condensed(tracer.record(lookup)))
        engine.finish(engine.requests[text])
    return {"store": stores, "lookup": lookups}


def main(folder: str, arena: str) -> None:
    """Run daemon and engine, and write ``traces.json``."""
    tracer = Tracer()
    # Imported here: the daemon's threads must begin under the tracer.
    from kvhearth_server import daemon
    from kvhearth_server.config.load import load_settings
    from kvhearth_server.engine import miss_ratio

    miss_ratio.PAUSE_S = 3600.0  # its task counts beside the way

    sockets = f"{folder}/s"
    settings = load_settings(
        {
            **SETTINGS,
            "shared_index": False,  # the way of a lookup that is a call
            "socket_dir": sockets,
            "arena_dir": arena,
            "ssd_dirs": [f"{folder}/ssd=512MiB"],
        }
    )

    def drive() -> None:
        try:
            until(settings.attach_socket.exists, "the daemon serves")
            with scripted_engine(f"kvhearth+unix://{sockets}", engine_id="traced") as engine:
                Path(folder, "traces.json").write_text(json.dumps(trace(engine, tracer)))
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=drive, daemon=True)
    thread.start()
    daemon.run(settings)
    thread.join()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
