"""A program of ``kvhearth bench fronts`` without an engine: blocks through ``kvhearth.open`` beside
files of its own.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import kvhearth

WAIT_S = 30.0


def say(line: str) -> None:
    """Write a line."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def timed(call: Callable[[], object]) -> float:
    """Return the seconds of a call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def main() -> None:
    """Run the jobs, or what is asked for without a daemon."""
    parser = argparse.ArgumentParser()
    for name in ("url", "folder"):
        parser.add_argument(f"--{name}")
    for name in ("page-bytes", "pages", "rounds"):
        parser.add_argument(f"--{name}", type=int)
    for name in ("ssd", "absent"):
        parser.add_argument(f"--{name}", action="store_true")
    given = parser.parse_args()
    say("an engine that prints")
    if given.absent:
        say(json.dumps({"absent_s": [0.001, 0.002, 0.004], "logged": 1}))
        return
    pages = np.random.default_rng(1).integers(0, 256, (given.pages, given.page_bytes), np.uint8)
    found = np.zeros_like(pages)
    contract = kvhearth.contract_for(pages, model="double", revision="1")
    seconds: dict[str, dict[str, list[float]]] = {"store": {}, "load": {}, "exists": {}}

    def note(job: str, side: str, call: Callable[[], object]) -> None:
        seconds[job].setdefault(side, []).append(timed(call))

    with kvhearth.open(given.url, contract) as cache:
        for number in range(given.rounds):
            keys = [
                hashlib.sha256(b"%d %d" % (number, page)).digest() for page in range(len(pages))
            ]
            path = Path(given.folder, str(number))
            note("store", "ours", lambda keys=keys: cache.store(keys, pages).result(WAIT_S))
            note("store", "theirs", lambda path=path: path.write_bytes(pages.data))
            note("store", "copy", lambda: np.copyto(found, pages))
            if given.ssd:
                say("evict")
                assert sys.stdin.readline() == "done\n"
                where = cache.lookup(keys)
                assert where.present.all(), "blocks are lost"
                assert not where.ready.any(), "blocks are still in memory"
            note("exists", "ours", lambda keys=keys: cache.lookup(keys))
            found[:] = 0
            note("load", "ours", lambda keys=keys: cache.load(keys, found, wait_s=WAIT_S).result())
            assert np.array_equal(found, pages)
            note("load", "theirs", path.read_bytes)
            note("load", "copy", lambda: np.copyto(found, pages))
    settings = {"versions": {"double": "1"}, "settings": "none", "bytes": pages.nbytes}
    say(json.dumps({**settings, "seconds": seconds, "compared_bytes": pages.nbytes}))


if __name__ == "__main__":
    main()
