"""Lookups of blocks in memory while the SSD tier writes, beside the same while it rests.

Run as ``python -m kvhearth_lab.bench.ssd.lookups URL SEED`` it is the engine whose stores the tier
writes: it commits blocks that nobody has written, so that the daemon's work is all there is.
"""

from __future__ import annotations

import contextlib
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from kvhearth.client import KVClient
from kvhearth.errors import KVHearthError
from kvhearth_lab.bench.daemon import (
    Served,
    attached,
    broken,
    contract,
    end_child,
    keys_of,
    served,
    store_zeros,
)
from kvhearth_lab.bench.report import p50, p99, steps, us
from kvhearth_lab.bench.ssd.figures import MIB, Result, Sizes

KEYS = 512
PAGE_BYTES = 4096
"""Size of the blocks that are looked up."""
WRITTEN_BYTES = MIB
"""Size of the blocks that are written."""
_MEMORY_BYTES = 256 * MIB
_BATCH = 16
_PAUSE_S = 0.002
_PIN_S = 3600.0
_WRITES_S = 30.0


def lookup_part(folder: Path, sizes: Sizes, result: Result) -> None:
    """Measure lookups in windows, quiet ones and such with writes in turns.

    Raises:
        KVHearthError: ``internal``: a lookup missed, or the tier did not write.
    """
    ssd = f"{folder / 'lookups'}={sizes.tier_bytes}"
    with served(memory=_MEMORY_BYTES, slot_bytes_min=PAGE_BYTES, ssd_dirs=[ssd]) as daemon:
        daemon.ready()
        with attached(daemon.client_url, contract(PAGE_BYTES)) as client, _writer(daemon) as writer:
            seed = secrets.token_bytes(16)
            store_zeros(client, PAGE_BYTES, seed, 0, KEYS)
            keys = keys_of(seed, 0, KEYS)
            client.pin({0: keys}, _PIN_S)
            quiet: list[float] = []
            writing: list[float] = []
            before = _written(daemon)
            for _ in steps(sizes.windows, "lookups while the tier writes"):
                _rest(daemon)
                quiet += _lookups(client, keys, sizes.window_s)
                at = _written(daemon)
                _say(writer, "go")
                _until(lambda: _written(daemon) > at, "the tier does not write")  # noqa: B023
                writing += _lookups(client, keys, sizes.window_s)
                _say(writer, "stop")
            written = _written(daemon) - before
    values = result.values
    values["lookup_quiet_p99_us"], values["lookup_quiet_p50_us"] = us(p99(quiet)), us(p50(quiet))
    values["lookup_writing_p99_us"] = us(p99(writing))
    values["lookup_p99_while_writing"] = round(p99(writing) / p99(quiet), 2)
    values["lookup_p50_while_writing"] = round(p50(writing) / p50(quiet), 2)
    values["lookup_written_gbs"] = round(written / (sizes.windows * sizes.window_s) / 1e9, 2)


def _lookups(client: KVClient, keys: list[bytes], seconds: float) -> list[float]:
    """Return the seconds of each lookup within a window; releases are not measured."""
    end, found = time.perf_counter() + seconds, list[float]()
    while (start := time.perf_counter()) < end:
        answer = client.lookup({0: keys})
        found.append(time.perf_counter() - start)
        if not answer.groups[0].leased.all():
            raise broken(f"a lookup missed: {answer.reason or answer.lease_short or 'evicted'}")
        client.release(answer.lease)
        time.sleep(_PAUSE_S)
    return found


def _written(daemon: Served) -> int:
    return int(daemon.operator(_WRITES_S).stats().counters.get("demoted_bytes", 0))


def _rest(daemon: Served) -> None:
    """Wait until the tier has written what waits."""
    last, same_since = -1, time.monotonic()
    end = time.monotonic() + _WRITES_S
    while time.monotonic() - same_since < 0.2:
        now = _written(daemon)
        if now != last:
            last, same_since = now, time.monotonic()
        if time.monotonic() > end:
            raise broken("the tier does not come to rest")
        time.sleep(0.02)
    daemon.wait_quiet()


def _until(true: Callable[[], bool], problem: str) -> None:
    end = time.monotonic() + _WRITES_S
    while not true():
        if time.monotonic() > end:
            raise broken(problem)
        time.sleep(0.01)


@contextlib.contextmanager
def _writer(daemon: Served) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", __name__, daemon.client_url, secrets.token_hex(16)]
    child = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf-8"
    )
    try:
        assert child.stdout is not None
        if child.stdout.readline().strip() != "ready":
            raise broken("the engine that writes did not come up")
        yield child
    finally:
        end_child(child)


def _say(child: subprocess.Popen[str], word: str) -> None:
    assert child.stdin is not None
    child.stdin.write(word + "\n")
    child.stdin.flush()


def main(url: str, seed: str) -> int:
    """Store blocks after ``go`` until ``stop``, as fast as the daemon gives room."""
    going, ending = threading.Event(), threading.Event()

    def listen() -> None:
        for line in sys.stdin:
            (going.set if line.strip() == "go" else going.clear)()
        ending.set()
        going.set()

    with attached(url, contract(WRITTEN_BYTES), "bench-writer") as client:
        threading.Thread(target=listen, daemon=True).start()
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        first = 0
        while not ending.is_set():
            going.wait()
            try:
                store_zeros(client, WRITTEN_BYTES, bytes.fromhex(seed), first, _BATCH)
            except KVHearthError:
                time.sleep(_PAUSE_S)  # no room before the tier has written
            first += _BATCH
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
