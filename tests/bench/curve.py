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
        self._blobs = list(cut)
        self._random = random

    def _request(self, number: int) -> list[KeysItem]:
        blob = self._blobs[number]
        return [KeysItem(0, PackedKeys(blob[:-1] + blob[-1:], 32))]

    def run(self, lookups: int, chosen: Any = None) -> float:
        """Make lookups; return the processor seconds that they took."""
        if chosen is None:
            chosen = self._random.zipf(1.2, lookups) % len(self._blobs)
        turn, spent = int(RATE * TURN_S), 0.0
        for start in range(0, lookups, turn):
            self._now += TURN_S
            # A request's keys are a copy that was made right before, in the processor's cache. To
            # make it is not the curve's work.
            some, copied = chosen[start : start + turn].tolist(), 0.0
            began = time.perf_counter()
            for each in some:
                self._request(each)
            copied = time.perf_counter() - began
            began = time.perf_counter()
            for each in some:
                self.accesses.looked_up(self._space, self._request(each), self._session)
            self._loop.run_until_complete(self.accesses.drain())
            spent += time.perf_counter() - began - copied
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
        before = bench.counters.get("untraced_keys")
        times = [bench.run(RATE) / RATE * 1e6 for _ in range(rounds)]
        lost = bench.counters.get("untraced_keys") - before
        row = {
            "keys": keys,
            "distinct": distinct,
            "best_us": round(min(times), 2),
            "median_us": round(statistics.median(times), 2),
            "percent_of_a_core": round(statistics.fmean(times) * RATE / 1e4, 2),
            "lost_part": round(lost / (rounds * RATE * keys), 3),
        }
        rows.append(row)
        print(row)
    print(json.dumps({"rows": rows}))


if __name__ == "__main__":
    main()
