"""Runs ``kvhearth bench peers``: for each peer a pair of KVHearth and the peer, in turns."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvhearth.errors import KVHearthError, Reason
from kvhearth.version import __version__
from kvhearth_lab.bench.local.figures import BATCH, KEYS, PAGE_BYTES, SMALL_BYTES, Sizes
from kvhearth_lab.bench.peers.adapter import (
    Adapter,
    PeerFailed,
    adapter_of,
    interpreters,
    parse_count,
    seconds_of,
)
from kvhearth_lab.bench.peers.kvhearth import our_copies, our_lookups
from kvhearth_lab.bench.report import machine, p50, p99, picture, ratio_of, steps, us

BATCHES = ("store", "store_bare", "load", "load_bare", "load_unverified", "first_touch")
ONES = ("store_one", "store_one_bare", "load_one", "load_one_bare", "load_one_unverified")
"""Measures of single blocks that a side may have. ``bare``: the peer's protocol with plain copies,
without the work that its own client adds. ``unverified``: without the comparison of checksums,
which only KVHearth has.
"""
FIRST_STORE = "first_store"
"""The first store into a daemon that was just started: one sample."""
LOOKUP = "lookup512"


@dataclass
class Samples:
    """Measurements of one side.

    Attributes:
        baselines, seconds: by measure, round by round: a plain copy of as many bytes right before,
            and the measurement itself.
        lookups: seconds of each lookup.
        compared_bytes: number of loaded bytes that were compared with those stored.
    """

    baselines: dict[str, list[float]] = field(default_factory=dict)
    seconds: dict[str, list[float]] = field(default_factory=dict)
    lookups: list[float] = field(default_factory=list)
    compared_bytes: int = 0

    def add(self, measure: str, baseline: float, seconds: float) -> None:
        """Record one measurement."""
        self.baselines.setdefault(measure, []).append(baseline)
        self.seconds.setdefault(measure, []).append(seconds)

    def figures(self, batch_bytes: int) -> dict[str, Any]:
        """Return figures by name. ``*_ratio`` of a batch is its speed against memcpy; 1 is as fast.
        ``*_ratio`` of a single block is its time against memcpy, as in ``kvhearth bench local``.
        """
        made: dict[str, Any] = {"compared_bytes": self.compared_bytes}
        spread: dict[str, list[float]] = {}
        for name in (*BATCHES, FIRST_STORE):
            if name in self.seconds:
                ratios = ratio_of(self.baselines[name], self.seconds[name])
                made[f"{name}_ratio"] = round(p50(ratios), 3)
                made[f"{name}_gbs"] = round(batch_bytes / p50(self.seconds[name]) / 1e9, 2)
                spread[f"{name}_ratio"] = [round(min(ratios), 3), round(max(ratios), 3)]
        for name in ONES:
            if name in self.seconds:
                times = self.seconds[name]
                made[f"{name}_p50_us"] = us(p50(times))
                made[f"{name}_ratio"] = round(p50(times) / p50(self.baselines[name]), 2)
                spread[f"{name}_p50_us"] = [us(min(times)), us(p99(times))]
        if self.lookups:
            made[f"{LOOKUP}_p50_us"] = us(p50(self.lookups))
            made[f"{LOOKUP}_p99_us"] = us(p99(self.lookups))
            spread[f"{LOOKUP}_p50_us"] = [us(min(self.lookups)), us(p99(self.lookups))]
        return {**made, "spread": spread}


def counterpart(measure: str) -> str:
    """Return the measure of ours that a peer's measure is compared with: the default way to do the
    same.
    """
    return measure.removesuffix("_bare").removesuffix("_unverified")


def against(ours: Samples, peer: Samples) -> dict[str, float]:
    """Return, by measure of the peer, its time over ours, as the median over rounds; 2 means that
    ours takes half as long.
    """
    made: dict[str, float] = {}
    for name, times in peer.seconds.items():
        own = ours.seconds.get(counterpart(name), [])
        rounds = [theirs / mine for theirs, mine in zip(times, own, strict=False)]
        if rounds:
            made[name] = round(p50(rounds), 2)
    if ours.lookups and peer.lookups:
        made[LOOKUP] = round(p50(peer.lookups) / p50(ours.lookups), 2)
    return made


def figure_names(found: Mapping[str, Any]) -> list[str]:
    """Return the figures of a pair that either side has, in the order of the table."""
    wanted = [f"{name}_ratio" for name in (*BATCHES, FIRST_STORE)]
    for name in ONES:
        wanted += [f"{name}_p50_us", f"{name}_ratio"]
    wanted += [f"{LOOKUP}_p50_us", f"{LOOKUP}_p99_us"]
    return [name for name in wanted if name in found["ours"] or name in found["peer"]]


def baselines_of(contenders: Sequence[Samples], measures: Sequence[str]) -> list[float]:
    """Return all plain copies beside these measures."""
    return [
        seconds
        for side in contenders
        for name in measures
        for seconds in side.baselines.get(name, [])
    ]


def draw(found: Mapping[str, Any], path: Path) -> None:
    """Write the plot: a row a peer, on the left batches against memcpy, on the right times.

    Raises:
        KVHearthError: ``config_invalid``: there is nothing to draw, or the file cannot be written.
    """
    peers = found["peers"]
    if not peers:
        raise KVHearthError(Reason.CONFIG_INVALID, f"--plot {path}: no peer was measured")
    ratios = [f"{name}_ratio" for name in (*BATCHES, FIRST_STORE)]
    times = [f"{name}_p50_us" for name in (*ONES, LOOKUP)]
    with picture(path, 12, 4 * len(peers), nrows=len(peers), squeeze=False) as rows:
        for (name, pair), (left, right) in zip(peers.items(), rows, strict=True):
            for axes, figures in ((left, ratios), (right, times)):
                known = [each for each in figures if each in pair["ours"] or each in pair["peer"]]
                for place, (side, colour) in enumerate(
                    (("ours", "tab:orange"), ("peer", "tab:blue"))
                ):
                    heights = [at + (place - 0.5) * 0.4 for at in range(len(known))]
                    values = [pair[side].get(each, 0) for each in known]
                    label = "kvhearth" if side == "ours" else name
                    axes.barh(heights, values, height=0.38, color=colour, label=label)
                axes.set_yticks(range(len(known)), known)
                axes.invert_yaxis()
                axes.legend()
            left.set_title(f"{name}: speed of 128 x 2 MiB against memcpy")
            right.set_title(f"{name}: microseconds, p50")


PEERS = ("lmcache", "mooncake")
_WARM_ROUNDS = 2
_SERIES = 50
_HUGE_BYTES = 2 << 20
_HUGE_SPARE = 256
"""Pages beyond arenas and engines' pages: pools are a little larger than their content."""

Note = Callable[[str], None]
Measure = Callable[[str, int], tuple[float, float]]


@dataclass
class Pair:
    """Results of one peer, filled part by part.

    Attributes:
        said: versions, settings and pages of the peer.
        skipped: reason for each missing part, by part.
        books: books errors that our daemons reported.
    """

    ours: Samples = field(default_factory=Samples)
    peer: Samples = field(default_factory=Samples)
    said: dict[str, Any] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    books: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Return one value of ``peers``."""
        batches = baselines_of((self.ours, self.peer), BATCHES)
        ones = baselines_of((self.ours, self.peer), ONES)
        batch_bytes = BATCH * PAGE_BYTES
        return {
            **self.said,
            "memcpy_gbs": round(batch_bytes / p50(batches) / 1e9, 2) if batches else None,
            "memcpy_one_p50_us": us(p50(ones)) if ones else None,
            "ours": self.ours.figures(batch_bytes),
            "peer": self.peer.figures(batch_bytes),
            "against": against(self.ours, self.peer),
            "books": {"balanced": not self.books, "errors": self.books},
        }


def run(
    sizes: Sizes, pythons: Mapping[str, Path | None], note: Note, *, hugepages: bool = True
) -> dict[str, Any]:
    """Measure all usable peers and return the object that the verb prints.

    Args:
        sizes: sizes of ``kvhearth bench local``.
        pythons: the interpreter of each peer, or None.
        note: receives a line for a person at each step.
        hugepages: all sides use 2 MiB pages if enough are free for all; otherwise none does.

    Raises:
        KVHearthError: our side does not work.
    """
    usable, skipped = interpreters(pythons)
    for name, reason in skipped.items():
        note(f"{name}: skipped: {reason}")
    described = machine()
    if described["load1"] > described["cpus"] / 2:
        note(
            f"the machine is busy: load {described['load1']:.1f} on {described['cpus']} CPUs. "
            "These figures say little, and they favour a side whose daemon copies: who slept is "
            "served first"
        )
    found: dict[str, Any] = {
        "version": __version__,
        "machine": described,
        "sizes": {
            "batch_blocks": BATCH,
            "block_bytes": PAGE_BYTES,
            "rounds": sizes.rounds,
            "ones": sizes.ones,
            "memory_bytes": sizes.memory_bytes,
            "lookup_keys": KEYS,
            "lookup_blocks": sizes.blocks_small,
            "lookups": sizes.lookups,
        },
    }
    start, peers = time.monotonic(), {}
    for name, python in usable.items():
        huge = hugepages and hugepages_free() * _HUGE_BYTES >= _needed_bytes(sizes)
        pair = _pair(name, python, sizes, huge, note)
        pair.said["hugepages"] = huge
        skipped |= {f"{name}.{part}": reason for part, reason in pair.skipped.items()}
        peers[name] = pair.as_json()
    found["seconds"] = round(time.monotonic() - start, 1)
    return {**found, "peers": peers, "skipped": skipped}


def hugepages_free() -> int:
    """Count the unused 2 MiB pages; 0 where the kernel has none of that size."""
    path = Path("/sys/kernel/mm/hugepages/hugepages-2048kB")
    try:
        free, reserved = (
            int((path / name).read_text(encoding="utf-8"))
            for name in ("free_hugepages", "resv_hugepages")
        )
    except OSError:
        return 0
    return free - reserved


def _needed_bytes(sizes: Sizes) -> int:
    """Return the bytes for the arena and the peer's memory; for source and target of both and of
    the peer's plain copies; and for a fresh client's pages.
    """
    return 2 * sizes.memory_bytes + 7 * BATCH * PAGE_BYTES + _HUGE_SPARE * _HUGE_BYTES


def _pair(name: str, python: Path, sizes: Sizes, huge: bool, note: Note) -> Pair:
    pair = Pair()
    for part, measured in (("copies", _copies), ("lookups", _lookups)):
        note(f"{name}: {part}: starting both")
        try:
            with _adapter(name, python) as adapter:
                said = adapter.prepare(
                    part=part,
                    memory_bytes=sizes.memory_bytes,
                    batch=BATCH,
                    page_bytes=PAGE_BYTES,
                    small_bytes=SMALL_BYTES,
                    blocks=sizes.blocks_small,
                    keys=KEYS,
                    hugepages=huge,
                )
                versions = ", ".join(f"{key} {text}" for key, text in said["versions"].items())
                note(f"{name}: {part}: {versions}; {said['settings']}; pages: {said['pages']}")
                measured(pair, adapter, said, sizes, huge)
        except PeerFailed as failed:
            pair.skipped[part] = str(failed)
            note(f"{name}: {part}: skipped: {failed}")
    return pair


@contextmanager
def _adapter(name: str, python: Path) -> Iterator[Adapter]:
    with tempfile.TemporaryDirectory(prefix="kvh-") as folder:
        adapter = adapter_of(python, name, Path(folder))
        try:
            yield adapter
        finally:
            adapter.close()


def _copies(pair: Pair, adapter: Adapter, said: dict[str, Any], sizes: Sizes, huge: bool) -> None:
    def peer(measure: str, number: int) -> tuple[float, float]:
        answer = adapter.run(measure, number)
        pair.peer.compared_bytes += parse_count(answer, "compared_bytes")
        return seconds_of(answer, "baseline"), seconds_of(answer)

    measures = said.pop("measures")
    with our_copies(sizes, huge, pair.books) as ours:
        pair.said = {**said, "our_pages": ours.pages}
        contenders: list[tuple[Samples, Measure, list[str]]] = [
            (pair.ours, ours.run, list(ours.measures)),
            (pair.peer, peer, measures),
        ]
        _batches(contenders, sizes)
        _ones(contenders, sizes)
        pair.ours.compared_bytes = ours.compared_bytes


def _batches(contenders: list[tuple[Samples, Measure, list[str]]], sizes: Sizes) -> None:
    """Run each measure of a batch, ours and the peer's in turns; the order alternates each
    round.
    """
    counts = dict.fromkeys(BATCHES, sizes.rounds + _WARM_ROUNDS)
    counts["first_touch"] = sizes.first_touches
    for number in steps(max(counts.values()), "batches of 128 x 2 MiB"):
        for name in BATCHES:
            if number >= counts[name]:
                continue
            for samples, measure, known in contenders[:: -1 if number % 2 else 1]:
                if name not in known:
                    continue
                baseline, seconds = measure(name, number)
                if name == "first_touch" or number >= _WARM_ROUNDS:
                    samples.add(name, baseline, seconds)
                elif name == "store" and number == 0:
                    samples.add(FIRST_STORE, baseline, seconds)


def _ones(contenders: list[tuple[Samples, Measure, list[str]]], sizes: Sizes) -> None:
    """Run the measures of single blocks, in turns."""
    for number in steps(sizes.ones, "single blocks of 2 MiB"):
        for name in ONES:
            for samples, measure, known in contenders[:: -1 if number % 2 else 1]:
                if name in known:
                    samples.add(name, *measure(name, number))


def _lookups(pair: Pair, adapter: Adapter, said: dict[str, Any], sizes: Sizes, huge: bool) -> None:
    pair.said.setdefault("versions", said["versions"])
    pair.said["lookup_settings"] = said["settings"]
    with our_lookups(sizes.blocks_small, huge, pair.books) as ours:
        for number in steps(-(-sizes.lookups // _SERIES), "lookups of 512 keys"):
            turns = [(pair.ours, ours.lookups), (pair.peer, adapter.lookups)]
            for samples, lookups in turns[:: -1 if number % 2 else 1]:
                samples.lookups += lookups(min(_SERIES, sizes.lookups))
