"""A driver in a plain loop, in a process of its own: no staging, no records, no checksums.

``python -m kvhearth_lab.bench.remote_tier.plain URL BYTES COUNT`` reads ``put`` and ``get`` from
its standard input, and answers each with seconds and processor seconds.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from kvhearth_server.tiers.base import Done
from kvhearth_server.tiers.remote.helper.__main__ import SWITCH_S, open_driver
from kvhearth_server.tiers.remote.helper.drivers.base import Driver
from kvhearth_server.tiers.remote.names import LAYOUT
from kvhearth_server.tiers.remote.url import parse_remote

_CALL_S = 30.0


def _portions(driver: Driver, size: int, count: int) -> list[slice]:
    step = max(1, min(driver.portion(size), -(-count // driver.parallel)))
    return [slice(at, at + step) for at in range(0, count, step)]


def _put(
    driver: Driver, pool: ThreadPoolExecutor, names: list[str], values: list[memoryview]
) -> None:
    def some(rows: slice) -> None:
        found = driver.put(names[rows], values[rows], time.monotonic() + _CALL_S)
        assert all(isinstance(each, Done) for each in found), found

    list(pool.map(some, _portions(driver, len(values[0]), len(names))))


def _get(
    driver: Driver, pool: ThreadPoolExecutor, names: list[str], into: list[memoryview]
) -> None:
    def some(rows: slice) -> None:
        found = driver.get(names[rows], into[rows], time.monotonic() + _CALL_S)
        for view, value in zip(into[rows], found, strict=True):
            assert isinstance(value, memoryview), value
            if value.obj is not view.obj:
                # The library's own memory: bytes have to come to where they are wanted.
                view[:] = value

    list(pool.map(some, _portions(driver, len(into[0]), len(names))))


async def serve(url: str, size: int, count: int) -> None:
    """Run the commands of stdin."""
    driver = open_driver(parse_remote(url))
    memory = np.frombuffer(bytearray(2 * size * count), np.uint8)
    memory[: size * count] = np.random.default_rng(1).integers(0, 256, size * count, np.uint8)
    driver.attach(memory.data)
    views = [memory[at : at + size].data for at in range(0, 2 * size * count, size)]
    names: list[str] = []
    pool = ThreadPoolExecutor(driver.parallel)
    sys.setswitchinterval(SWITCH_S)
    for line in sys.stdin:
        if line.strip() == "put":
            space = f"{LAYOUT}/{secrets.token_hex(16)}"
            names = [f"{space}/{secrets.token_hex(16)}" for _ in range(count)]
        began, cpu = time.perf_counter(), time.process_time()
        if line.strip() == "put":
            _put(driver, pool, names, views[:count])
        else:
            _get(driver, pool, names, views[count:])
        seconds, spent = time.perf_counter() - began, time.process_time() - cpu
        if line.strip() == "get":
            assert (memory[: size * count] == memory[size * count :]).all()
            memory[size * count :] = 0
            await driver.delete(names, time.monotonic() + _CALL_S)
        sys.stdout.write(json.dumps([seconds, spent]) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
