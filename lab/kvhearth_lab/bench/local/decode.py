"""Commits of engines that decode: the daemon's processor time for each block."""

from __future__ import annotations

import secrets
import time

import numpy as np

from kvhearth.client import KVClient
from kvhearth.model import checksum_of
from kvhearth.results import CommitGroup
from kvhearth_lab.bench.daemon import Served, attached, broken, contract, keys_of, served
from kvhearth_lab.bench.local.figures import SMALL_BYTES, Result, Sizes
from kvhearth_lab.bench.report import steps

_CHAINS = 16
"""Requests that fill a block in a step: of 256, with blocks of 16 tokens."""
_STEP_S = 0.002
_RESERVED = 1024
_STEPS = _RESERVED // _CHAINS
"""Steps until a request holds as many blocks as were reserved for all."""
_MEMORY_BYTES = 512 << 20


def decode_part(result: Result, sizes: Sizes) -> None:
    """Measure commits of one new block for each of many requests, as decode makes them: one call a
    step. The daemon's time for reservations and checksums counts; reservations are as large as a
    connector's.
    """
    with served(memory=_MEMORY_BYTES) as daemon:
        daemon.ready()
        with attached(daemon.client_url, contract(SMALL_BYTES)) as client:
            for name, sealed in (
                ("decode_commits_per_core_s", False),
                ("decode_commits_sealed_per_core_s", True),
            ):
                _steps_of(client, 1, sealed=sealed)  # first calls pay for imports
                rates = [
                    _rate(daemon, client, sizes.decode_reserves, sealed=sealed)
                    for _ in steps(sizes.decode_rounds, "commits while decoding")
                ]
                result.put(name, rates, 0)
        result.book_errors += daemon.book_errors()


def _rate(daemon: Served, client: KVClient, reserves: int, *, sealed: bool) -> float:
    daemon.wait_quiet()
    before = daemon.cpu_s()
    _steps_of(client, reserves, sealed=sealed)
    daemon.wait_quiet()
    return reserves * _RESERVED / (daemon.cpu_s() - before)


def _steps_of(client: KVClient, reserves: int, *, sealed: bool) -> None:
    digest = np.frombuffer(checksum_of(bytes(SMALL_BYTES)), np.uint8)
    sums = np.tile(digest, (_CHAINS, 1, 1)) if sealed else None
    seed = secrets.token_bytes(16)
    before = [b""] * _CHAINS
    for number in range(reserves):
        slots = client.reserve({0: _RESERVED})
        extents = slots.groups[0]
        if len(extents) < _RESERVED:
            raise broken(f"no slots: {slots.short_reason or slots.reason}")
        for step in range(_STEPS):
            keys = keys_of(seed, (number * _STEPS + step) * _CHAINS, _CHAINS)
            some = extents[step * _CHAINS : (step + 1) * _CHAINS]
            chains = list(enumerate(before))
            group = CommitGroup(keys, some, sums, chains=chains)
            answer = client.commit({0: group}, boot_id=slots.boot_id)
            if answer.reason or not answer.stored[0].all():
                raise broken(f"a commit failed: {answer.reason or 'known key'}")
            before = keys
            time.sleep(_STEP_S)
