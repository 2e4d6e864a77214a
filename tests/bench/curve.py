"""Processor time of the miss-ratio curve: microseconds a lookup, at 5,000 lookups a second.

    .venv/bin/python tests/bench/curve.py

Lookups of chains by popularity, as the dispatcher reports them, in turns of a tenth of a second;
time is virtual, so that no second passes idle. The sample is in its steady state.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.core_kit import Rig, contract, full

from kvhearth.keys import PackedKeys
from kvhearth_server.core.lookup import KeysItem
from kvhearth_server.engine.accesses import Accesses
from kvhearth_server.observability.counters import Counters
from kvhearth_server.observability.metrics import COUNTERS

RATE = 5000
TURN_S = 0.1
BLOCK = 2 << 20


class Bench:
    """A core with one namespace, and chains of ``keys`` keys that are looked up."""

    def __init__(self, keys: int, distinct: int) -> None:
        rig = Rig(64, slab_bytes=64 << 20)
        self._session = rig.attach(contract(full(page_bytes=BLOCK)))
        self._space = rig.state.namespaces.get(rig.group(self._session).namespace)
        rig.state.ledger.segments[0].capacity = distinct * BLOCK // 2
        self._now = 0.0
        self._loop = asyncio.new_event_loop()
        self.counters = Counters(COUNTERS)
        engine = SimpleNamespace(
            core=rig.core, now=lambda: self._now, counters=self.counters, tiering=None
        )
        self.accesses = Accesses(cast("Any", engine), 8192)
        random = np.random.default_rng(0)
        count = max(1, distinct // keys)
        blob = random.bytes(32 * keys * count)
        cut = (blob[at : at + 32 * keys] for at in range(0, len(blob), 32 * keys))
        self._items = [[KeysItem(0, PackedKeys(each, 32))] for each in cut]
        self._random = random

    def run(self, lookups: int, chosen: Any = None) -> float:
        """Make lookups; return the processor seconds that they took."""
        if chosen is None:
            chosen = self._random.zipf(1.2, lookups) % len(self._items)
        turn, spent = int(RATE * TURN_S), 0.0
        for start in range(0, lookups, turn):
            some = [self._items[each] for each in chosen[start : start + turn]]
            self._now += TURN_S
            began = time.process_time()
            for items in some:
                self.accesses.looked_up(self._space, items, self._session)
            self._loop.run_until_complete(self.accesses.drain())
            spent += time.process_time() - began
        return spent


def main() -> None:
    """Print a row for each size of lookups, and one JSON object at the end."""
    parser = argparse.ArgumentParser(description="Processor time of the miss-ratio curve.")
    parser.add_argument("--rounds", type=int, default=8)
    rounds: int = parser.parse_args().rounds
    rows = []
    for keys, distinct in ((1, 100_000), (16, 100_000), (64, 1_000_000), (512, 1_000_000)):
        bench = Bench(keys, distinct)
        every = np.arange(distinct // keys)
        bench.run(len(every), every)
        bench.run(4 * RATE)
        times = [bench.run(RATE) / RATE * 1e6 for _ in range(rounds)]
        row = {
            "keys": keys,
            "distinct": distinct,
            "best_us": round(min(times), 2),
            "median_us": round(statistics.median(times), 2),
            "percent_of_a_core": round(min(times) * RATE / 1e4, 2),
            "lost_keys": bench.counters.get("untraced_keys"),
        }
        rows.append(row)
        print(row)
    print(json.dumps({"rows": rows}))


if __name__ == "__main__":
    main()
