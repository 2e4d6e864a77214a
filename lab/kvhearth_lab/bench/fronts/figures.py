"""Sizes and figures of ``kvhearth bench fronts``, with targets."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvhearth_lab.bench.report import Figure

MIB = 1 << 20
PAGES = {"": 2 * MIB, "_256k": 256 << 10}
"""Bytes of a page, by the suffix of the figures' names."""
MEDIA = {"": "in memory", "_ssd": "on SSD only"}
"""Where our blocks are when they are loaded."""


@dataclass(frozen=True)
class Front:
    """One engine's offloading, which KVHearth is behind.

    Attributes:
        option: flag of its interpreter, without dashes.
        program: module that the engine's interpreter runs.
        prefix: beginning of its figures' names.
        store, load: the engine's words for them.
        peer: name of the engine's own file back end.
    """

    option: str
    program: str
    prefix: str
    store: str
    load: str
    peer: str


_PACKAGE = __package__
FRONTS = (
    Front("vllm", f"{_PACKAGE}.vllm_tier", "vllm_tier", "store", "load", "fs"),
    Front("sglang", f"{_PACKAGE}.sglang", "sglang", "set", "get", "file"),
    Front("lmcache", f"{_PACKAGE}.lmcache", "lmcache_l2", "store", "load", "fs_native"),
)


@dataclass(frozen=True)
class Sizes:
    """Counts of one run.

    Attributes:
        job_bytes: bytes that a job stores or loads.
        rounds: alternating rounds; a figure is their median.
    """

    job_bytes: int
    rounds: int

    @property
    def round_bytes(self) -> int:
        """Bytes of all rounds, with one that warms up."""
        return (self.rounds + 1) * self.job_bytes


FULL = Sizes(128 * MIB, 9)
QUICK = Sizes(32 * MIB, 3)


def figures_of(front: Front) -> Iterator[Figure]:
    """Yield the figures of one engine, in the table's order."""
    name = front.prefix
    for medium, place in MEDIA.items():
        least = 1.0 if medium else 2.0
        for size, page_bytes in PAGES.items():
            what = f"{page_bytes >> 10} KiB pages, {place}"
            for word in (front.store, front.load):
                figure = f"{name}_{word}_vs_{front.peer}{medium}{size}"
                yield Figure(figure, f"{word}s, {what}: their time over ours", ">=", least)
    yield Figure(f"{name}_load_vs_copy", "loads of 2 MiB, of a plain copy's speed", ">=", 0.8)
    yield Figure(f"{name}_exists_ms", "one call for the keys of a job of 2 MiB pages, ms")
    yield Figure(f"{name}_absent_ms", "one call without a daemon, ms", "<=", 1.0)
    yield Figure(f"{name}_absent_logged", "warnings of all calls without a daemon", "<=", 1)


FIGURES = tuple(figure for front in FRONTS for figure in figures_of(front))
