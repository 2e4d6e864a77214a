"""Records with and without encryption, on one thread: what sealing and opening them costs."""

from __future__ import annotations

import secrets
import statistics
import time
from collections import defaultdict
from collections.abc import Callable

import numpy as np

from kvhearth.model import checksum_of
from kvhearth_lab.bench.daemon import broken
from kvhearth_lab.bench.remote_tier.figures import BATCH
from kvhearth_server.tiers.base import BlockSpec
from kvhearth_server.tiers.remote.helper.sealing import Sealer
from kvhearth_server.tiers.remote.names import object_names, space_name
from kvhearth_server.tiers.remote.record import Head, Name, record_bytes


def sealing_part(size: int, rounds: int) -> dict[str, float]:
    """Return figures of a batch of blocks of ``size`` bytes: GB/s of sealing, of opening, and of a
    copy with its checksum in the place of each.
    """
    fleet_key, spec = secrets.token_bytes(32), BlockSpec(bytes(32), 0, 1, size)
    sealer, space = Sealer(fleet_key), space_name(fleet_key, "bench", "{}", "", 0)
    keys = [secrets.token_bytes(32) for _ in range(BATCH)]
    objects = object_names(fleet_key, space, keys)
    names = [Name(name, space, spec, key) for name, key in zip(objects, keys, strict=True)]
    source = np.random.default_rng(3).integers(0, 256, (BATCH, size), np.uint8)
    target = np.zeros_like(source)
    records = np.zeros((BATCH, record_bytes(spec)), np.uint8)

    def copy() -> None:
        for row, into in zip(source, target, strict=True):
            into[:] = row
            checksum_of(into.data)

    def seal() -> None:
        for name, row, into in zip(names, source, records, strict=True):
            sealer.seal(name, b"", checksum_of(row.data), [row.data], into.data)

    def unseal() -> None:
        for name, record, into in zip(names, records, target, strict=True):
            if not isinstance(sealer.open(name, record.data, [into.data]), Head):
                raise broken("a record does not open")

    samples: dict[str, list[float]] = defaultdict(list)
    ways: dict[str, Callable[[], None]] = {"copy": copy, "seal": seal, "open": unseal}
    for number in range(rounds + 1):
        for what, way in ways.items():
            began = time.perf_counter()
            way()
            if number:  # the first round touches the memory
                samples[what].append(time.perf_counter() - began)
    if not (source == target).all():
        raise broken("other bytes came back")
    speeds = {what: BATCH * size / statistics.median(each) for what, each in samples.items()}
    return {f"{what}_gb_s": round(speed / 1e9, 3) for what, speed in speeds.items()}
