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

import numpy as np

from kvhearth_server.tiers.base import Done, Outcome
from kvhearth_server.tiers.remote.helper.__main__ import open_driver
from kvhearth_server.tiers.remote.helper.drivers.base import Driver
from kvhearth_server.tiers.remote.url import parse_remote

_CALL_S = 30.0


async def _put(driver: Driver, names: list[str], values: list[memoryview]) -> None:
    slots = asyncio.Semaphore(driver.parallel)

    async def one(name: str, value: memoryview) -> Outcome:
        async with slots:
            return await driver.put(name, value, time.monotonic() + _CALL_S)

    pairs = zip(names, values, strict=True)
    outcomes = await asyncio.gather(*(one(*each) for each in pairs))
    assert all(isinstance(each, Done) for each in outcomes), outcomes


async def _get(driver: Driver, names: list[str], into: list[memoryview]) -> None:
    slots = asyncio.Semaphore(driver.parallel)
    step = driver.portion(len(into[0]))

    async def some(start: int) -> None:
        async with slots:
            found = await driver.get(
                names[start : start + step],
                into[start : start + step],
                time.monotonic() + _CALL_S,
            )
        for view, value in zip(into[start : start + step], found, strict=True):
            assert isinstance(value, memoryview), value
            if value.obj is not view.obj:
                # The library's own memory: bytes have to come to where they are wanted.
                view[:] = value

    await asyncio.gather(*(some(start) for start in range(0, len(names), step)))


async def serve(url: str, size: int, count: int) -> None:
    """Run the commands of stdin."""
    driver = open_driver(parse_remote(url))
    memory = np.frombuffer(bytearray(2 * size * count), np.uint8)
    memory[: size * count] = np.random.default_rng(1).integers(0, 256, size * count, np.uint8)
    driver.attach(memory.data)
    views = [memory[at : at + size].data for at in range(0, 2 * size * count, size)]
    names: list[str] = []
    for line in sys.stdin:
        if line.strip() == "put":
            names = [f"1/{secrets.token_hex(16)}/{secrets.token_hex(16)}" for _ in range(count)]
        began, cpu = time.perf_counter(), time.process_time()
        if line.strip() == "put":
            await _put(driver, names, views[:count])
        else:
            await _get(driver, names, views[count:])
        seconds, spent = time.perf_counter() - began, time.process_time() - cpu
        if line.strip() == "get":
            assert (memory[: size * count] == memory[size * count :]).all()
            memory[size * count :] = 0
            await driver.delete(names, time.monotonic() + _CALL_S)
        sys.stdout.write(json.dumps([seconds, spent]) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
