"""Runs ``kvhearth bench stalls``: real clients, and a real daemon with a watched loop."""

from __future__ import annotations

import contextlib
import itertools
import secrets
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from kvhearth.client import KVClient
from kvhearth.contract import Contract
from kvhearth.model import U8, checksum_of
from kvhearth.results import CommitGroup
from kvhearth.version import __version__
from kvhearth_lab.bench.daemon import (
    CHAIN_KEYS,
    DEADLINE_S,
    Served,
    attached,
    broken,
    contract,
    keys_of,
    served,
)
from kvhearth_lab.bench.report import machine, missed, steps
from kvhearth_lab.bench.stalls.figures import (
    BAD,
    COMMITTED,
    FIGURES,
    PARTS,
    RESERVED,
    SLAB_SLOTS,
    SLOT_BYTES,
    Sizes,
)
from kvhearth_lab.bench.stalls.watched_daemon import Longest, WatchFile
from kvhearth_lab.harness.daemon import module

WATCHED = "kvhearth_lab.bench.stalls.watched_daemon"
_ASKED = 128
"""Number of keys in a lookup and of blocks in a reservation, for each of many clients."""


@dataclass
class Course:
    """Results of a run so far.

    Attributes:
        module: module whose main is the watched daemon.
        longest: by figure, the longest call and the greatest lateness over all daemons.
        spread: by figure, the least and the greatest of the longest calls of several runs.
        book_errors: books errors that the daemons reported at their end.
    """

    module: str
    longest: dict[str, Longest] = field(default_factory=dict)
    spread: dict[str, list[float]] = field(default_factory=dict)
    book_errors: list[str] = field(default_factory=list)

    @classmethod
    def least(cls, courses: Sequence[Course]) -> Course:
        """Combine runs of the same work: the least of each figure, and the spread.

        A call that the daemon's code makes long is long in each run. Calls of a few microseconds,
        such as one read of a pipe, were charged up to 25 ms in one run of several: a virtual
        machine's hiccups count as processor time.
        """
        made = cls(courses[0].module)
        for name in courses[0].longest:
            found = sorted(
                (each.longest[name] for each in courses), key=lambda one: one.call_cpu_ms
            )
            made.longest[name] = found[0]
            made.spread[name] = [found[0].call_cpu_ms, found[-1].call_cpu_ms]
        made.book_errors = [error for each in courses for error in each.book_errors]
        return made

    @contextlib.contextmanager
    def daemon(self, slabs: int) -> Iterator[Watched]:
        """Run a daemon with an arena of ``slabs`` slabs; its books are checked at the end."""
        with tempfile.TemporaryDirectory(prefix="kvh-") as name:
            path = Path(name) / "watch"
            file = WatchFile(path)
            starter = module(self.module, str(path), str(slabs))
            with served(starter, sessions_max=1024, hugepages="off") as daemon:
                daemon.ready()
                file.take()  # startup does not count: no client waits for it
                yield Watched(self, daemon, file, slabs * SLAB_SLOTS)
                file.take()
                self.book_errors += daemon.book_errors()

    def as_json(self) -> dict[str, Any]:
        """Return the object that the verb prints."""
        values: dict[str, Any] = {name: self.longest[name].call_cpu_ms for name in PARTS}
        values["longest_call_cpu_ms"] = max(values.values())
        values["timer_late_max_ms"] = max(each.timer_late_ms for each in self.longest.values())
        return {
            **values,
            "spread": self.spread,
            "calls": {name: self.longest[name].name for name in PARTS},
            "timer_late_ms": {name: self.longest[name].timer_late_ms for name in PARTS},
            "books": {"balanced": not self.book_errors, "errors": self.book_errors},
            "missed": missed(values, FIGURES),
        }


@dataclass(frozen=True)
class Watched:
    """A daemon, the file with its loop's times, and its number of slots."""

    course: Course
    daemon: Served
    file: WatchFile
    slots: int

    def take(self, figure: str) -> None:
        """Count the maxima since the last call for a figure."""
        found, before = self.file.take(), self.course.longest.get(figure)
        if before is not None:
            longer = max(found, before, key=lambda each: each.call_cpu_ms)
            late_ms = max(found.timer_late_ms, before.timer_late_ms)
            found = replace(longer, timer_late_ms=late_ms)
        self.course.longest[figure] = found

    @contextlib.contextmanager
    def engine(self, number: int = 0) -> Iterator[Engine]:
        """Provide a client with its own namespace, chosen by ``number``.

        Raises:
            KVHearthError: it cannot attach.
        """
        made = replace(contract(SLOT_BYTES), model=f"bench-{number}")
        url, engine_id = self.daemon.client_url, f"bench-{number}"
        with attached(url, made, engine_id, map_arena=False) as client:
            yield Engine(client, made, secrets.token_bytes(16))


@dataclass(frozen=True)
class Engine:
    """One client and the seed of its keys."""

    client: KVClient
    contract: Contract
    seed: bytes

    def store(self, first: int, end: int, *, reserved: int = RESERVED, good: bool = True) -> None:
        """Reserve ``reserved`` blocks at once, and commit them in an engine's portions. Their bytes
        are zeros; ``good`` determines whether their checksums match.
        """
        sums = _sums(good=good)
        for start in range(first, end, reserved):
            count = min(reserved, end - start)
            slots = self.client.reserve({0: count})
            if len(slots.groups[0]) < count:
                raise broken(f"a reservation fell short: {slots.short_reason or slots.reason}")
            for done in range(0, count, COMMITTED):
                extents = slots.groups[0][done : done + COMMITTED]
                at = start + done
                keys = keys_of(self.seed, at, len(extents))
                parent = keys_of(self.seed, at - 1, 1)[0] if at % CHAIN_KEYS else b""
                group = CommitGroup(keys, extents, sums[: len(keys)], parent)
                answer = self.client.commit({0: group}, boot_id=slots.boot_id)
                if not answer.stored[0].all():
                    raise broken(f"a commit fell short: {answer.reason or 'known key'}")

    def look(self, first: int, count: int) -> int:
        """Look up neighbours in a chain and release them; returns the number of hits."""
        found = self.client.lookup({0: keys_of(self.seed, first, count)})
        if found.reason:
            raise broken(f"a lookup failed: {found.reason}")
        if found.lease is not None:
            self.client.release(found.lease)
        return int(found.groups[0].ready.sum())


def run(sizes: Sizes, module: str = WATCHED) -> dict[str, Any]:
    """Measure everything and return the object that the verb prints.

    Args:
        sizes: sizes of the run.
        module: module whose main is the watched daemon.

    Raises:
        KVHearthError: a daemon, a client or a part of the run does not work, so that figures would
            mean nothing.
    """
    courses, start = [Course(module) for _ in range(sizes.repeats)], time.monotonic()
    for part, course in itertools.product((_growth, _namespaces, _many, _clients), courses):
        part(course, sizes)
    return {
        "version": __version__,
        "machine": machine(),
        **Course.least(courses).as_json(),
        "seconds": round(time.monotonic() - start, 1),
    }


def _growth(course: Course, sizes: Sizes) -> None:
    """Fill an empty daemon from one engine."""
    with course.daemon(_slabs(sizes.growth)) as watched, watched.engine() as engine:
        _fill(engine, sizes.growth, f"growth to {sizes.growth:,} blocks")
        watched.take("growth_ms")


def _namespaces(course: Course, sizes: Sizes) -> None:
    """Fill the arena from many namespaces, one after another; then store more from another
    engine.
    """
    for count in sizes.namespaces:
        with course.daemon(sizes.full_slabs) as watched:
            each = -(-watched.slots // count)
            for number in steps(count, f"{count:,} namespaces"):
                with watched.engine(number) as engine:
                    engine.store(0, each)
            with watched.engine(count) as engine:
                engine.store(0, sizes.rounds * RESERVED)
            watched.take("namespaces_ms")


def _many(course: Course, sizes: Sizes) -> None:
    """Report bad blocks, bump the epoch, and evict as an operator, in a daemon with many blocks."""
    with course.daemon(_slabs(sizes.many + RESERVED + BAD)) as watched:
        with watched.engine() as engine:
            _fill(engine, sizes.many, f"{sizes.many:,} blocks")
            watched.file.take()  # growth has its own figure
            for _ in steps(1, "bad blocks"):
                _bad_blocks(watched, engine, sizes.many)
                watched.take("bad_blocks_ms")
            for _ in steps(1, "an epoch bump"):
                if engine.client.bump_epoch() < 0:
                    raise broken("the epoch could not be bumped")
                # The same keys under new weights take the places of the old blocks.
                engine.store(0, min(sizes.many, sizes.rounds * RESERVED))
                watched.take("bump_ms")
        for _ in steps(1, "an operator's eviction"):
            if not _evict_all(watched.daemon):
                raise broken("nothing was evicted")
            watched.take("evict_ms")


def _evict_all(daemon: Served) -> int:
    """Evict every namespace as ``kvhearth evict --keep 0`` does; returns the number of blocks."""
    operator = daemon.operator(DEADLINE_S)
    spaces = operator.namespaces().namespaces
    return sum(operator.evict(space.namespace, 0, None).evicted_blocks for space in spaces)


def _bad_blocks(watched: Watched, engine: Engine, first: int) -> None:
    """Store blocks whose checksums are wrong, and report them all at once."""
    engine.store(first, first + BAD, reserved=BAD, good=False)
    found = engine.client.lookup({0: keys_of(engine.seed, first, BAD)})
    if found.reason or found.lease_short:
        raise broken(f"bad blocks were not there: {found.reason or found.lease_short}")
    engine.client.release(found.lease, bad={0: found.groups[0].extents})
    end = time.monotonic() + DEADLINE_S
    while engine.look(first, BAD):
        if time.monotonic() > end:
            raise broken("bad blocks were not removed")
        time.sleep(0.05)
    removed = watched.daemon.stats().counters.get("removed_blocks{checksum}", 0)
    if removed != BAD:
        raise broken(f"{removed} bad blocks were removed, not {BAD}")


def _clients(course: Course, sizes: Sizes) -> None:
    """Store and look up from many engines at once in a full arena."""
    with course.daemon(sizes.full_slabs) as watched, contextlib.ExitStack() as undo:
        engines = [undo.enter_context(watched.engine(n)) for n in range(sizes.clients)]
        stop = threading.Event()
        pool = undo.enter_context(ThreadPoolExecutor(sizes.clients))
        undo.callback(stop.set)  # runs before the wait for the pool
        works = [pool.submit(_work, engine, stop) for engine in engines]
        for _ in steps(10, f"{sizes.clients} clients"):
            time.sleep(sizes.clients_s / 10)
        watched.take("clients_ms")
        stop.set()
        for work in works:
            if not work.result():
                raise broken("a client stored nothing")


def _work(engine: Engine, stop: threading.Event) -> int:
    """Store and look up until stopped; returns the number of blocks stored."""
    first = 0
    while not stop.is_set():
        engine.store(first, first + _ASKED, reserved=_ASKED)
        engine.look(max(0, first - _ASKED), _ASKED)
        first += _ASKED
    return first


def _fill(engine: Engine, blocks: int, what: str) -> None:
    starts = range(0, blocks, RESERVED)
    for number in steps(len(starts), what):
        engine.store(starts[number], min(starts[number] + RESERVED, blocks))


def _slabs(blocks: int) -> int:
    return -(-blocks // SLAB_SLOTS) + 1


def _sums(*, good: bool) -> U8:
    digest = np.frombuffer(checksum_of(bytes(SLOT_BYTES)), np.uint8)
    return np.tile(digest if good else ~digest, (COMMITTED, 1, 1))
