"""The good client: stores and loads verified blocks all the time, and reports each call.

Run as ``python -m kvhearth_lab.hostile.good JSON PARENT`` by ``harness.client_process``. With
``visits`` it is a client that comes and goes: attaches, stores, loads, and leaves.
"""

from __future__ import annotations

import json
import queue
import random
import sys
import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from kvhearth.errors import KVHearthError
from kvhearth_lab.harness.client_process import end_with
from kvhearth_lab.harness.engine import Engine, Seen, contract_of, key_of
from kvhearth_lab.hostile.attack import become

MEASURED = ("lookup", "reserve", "commit")
"""Calls that the client waits for; a release is sent in the background."""
STORED = 4
LOADED = 8
KNOWN = 256
"""Number of newest blocks that must be found: far fewer than eviction may take."""
PAUSE_S = 0.005
VISIT_PAUSE_S = 0.25
_MODELS = 64
_TOLD_S = 0.1
_READY_S = 30.0


class Good:
    """One engine and its book of stored blocks."""

    def __init__(self, url: str, page_bytes: int, model: str) -> None:
        contract = contract_of(page_bytes, model=model)
        self.engine = Engine(url, contract, model, key_of=partial(key_of, model))
        self.engine.clock.slow_s = 0.0  # thus every call is listed
        self.known: list[int] = []
        self.errors: list[str] = []
        self.wrong: list[str] = []
        self.lost: list[str] = []
        self._next = 0
        self._rng = random.Random(1)

    def store(self) -> None:
        """Store new blocks; a block counts as known once the daemon has acknowledged it."""
        numbers = list(range(self._next, self._next + STORED))
        self._next += STORED
        # Without a parent: eviction takes a chain from its end, thus the newest blocks first.
        done = self.engine.store(numbers)
        if done.reason or len(done.bound) < STORED:
            self.errors.append(f"store: {done.reason or 'short'}")
        self.known = (self.known + done.bound)[-KNOWN:]

    def load(self) -> None:
        """Load known blocks and compare each byte; a block that is not there is lost."""
        chosen = self._rng.sample(self.known, min(LOADED, len(self.known)))
        if not chosen:
            return
        seen: Seen = self.engine.check(chosen)
        self.wrong += seen.bad
        if seen.reason:
            self.errors.append(f"load: {seen.reason}")
            return
        self.errors += [f"load: {reason}" for reason in seen.failed]
        self.lost += [f"block {number}" for number in seen.absent]
        gone = set(seen.absent)
        self.known = [number for number in self.known if number not in gone]

    def take(self) -> dict[str, Any]:
        """Return the results since the last call, as a line; empty if there are none."""
        calls = [each for each in self.engine.clock.slow if each[0] in MEASURED]
        self.engine.clock.slow.clear()
        line = {"calls": calls, "errors": self.errors, "wrong": self.wrong, "lost": self.lost}
        self.errors, self.wrong, self.lost = [], [], []
        return {"at": time.monotonic(), **line} if any(line.values()) else {}


def _stay(start: dict[str, Any], commands: queue.Queue[str]) -> None:
    """Work until the end command."""
    good = Good(start["url"], start["page_bytes"], start["model"])
    try:
        good.engine.wait_ready(_READY_S)
        told = time.monotonic()
        while commands.empty():
            good.store()
            good.load()
            if time.monotonic() - told > _TOLD_S:
                told = time.monotonic()
                _say(good.take())
            time.sleep(PAUSE_S)
        _say(good.take())
    finally:
        good.engine.close()


def _visit(start: dict[str, Any], commands: queue.Queue[str]) -> None:
    """Come and go until the end command."""
    number = 0
    while commands.empty():
        begin = time.monotonic()
        good = Good(start["url"], start["page_bytes"], f"{start['model']}-{number % _MODELS}")
        number += 1
        try:
            good.engine.wait_ready(start["attach_s"])
            attached = time.monotonic()
            good.store()
            good.load()
            line = good.take()
            line["attaches"] = [("attach", begin, attached)]
        except KVHearthError as error:
            line = {"at": time.monotonic(), "errors": [f"attach: {error}"]}
        finally:
            good.engine.close()
        line["calls"] = []
        _say(line)
        time.sleep(VISIT_PAUSE_S)


def _listen(commands: queue.Queue[str]) -> None:
    for line in sys.stdin:
        commands.put(line)
    commands.put("")


def _say(line: dict[str, Any]) -> None:
    if line:
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()


def main(words: Sequence[str]) -> int:
    """Run ``python -m kvhearth_lab.hostile.good JSON PARENT``."""
    start = json.loads(words[0])
    become(start["uid"])
    end_with(int(words[1]))
    commands: queue.Queue[str] = queue.Queue()
    threading.Thread(target=_listen, args=(commands,), daemon=True).start()
    (_visit if start["visits"] else _stay)(start, commands)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
