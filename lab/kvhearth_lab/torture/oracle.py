"""The record of promises to compare with the daemon: sealed blocks, reported failures, drive
content.

The daemon is also asked before a planned death, since its successor does not know its counters.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvhearth.errors import KVHearthError
from kvhearth_lab.torture import damage
from kvhearth_lab.torture.damage import DRIVE
from kvhearth_lab.torture.report import CAUGHT, CRASH, LOST
from kvhearth_lab.torture.world_config import PRESSED
from kvhearth_server.engine.snapshot import Stats

if TYPE_CHECKING:
    from kvhearth_lab.torture.scene import Scenario


IMPATIENT = "demotion_refused{slow}"
"""The daemon's counter of blocks that it gave up unwritten because the tier made no progress."""

_QUIET_S = 2.0
_POLL_S = 0.05


def failures(scenario: Scenario, said: Stats) -> None:
    """Report failures that the daemon itself counted since the last look."""
    counters = dict(said.counters)
    before, reported = scenario.counted
    scenario.counted = (said.boot_id, counters)
    for name, count in counters.items():
        more = count - (reported.get(name, 0) if before == said.boot_id else 0)
        if more <= 0:
            continue
        if name.startswith("task_failures"):
            text = f"{more} {name}: {scenario.daemon.complaints()}"
            scenario.report.find(CRASH, text, scenario.where)
        elif name.startswith("checksum_failures"):
            scenario.report.figures["checksum_failures_counted"] += more
            if not scenario.explains_checksum(name):
                scenario.report.find(CAUGHT, f"{more} {name}", scenario.where)
        elif name == IMPATIENT and not scenario.drive_is_suspect:
            # Reported even if no sealed block is missing yet: they may be evicted at any moment.
            text = f"{more} blocks were given up unwritten, though no fault stopped the drive"
            scenario.report.find(LOST, text, scenario.where, more)


def look_at_drive(scenario: Scenario) -> None:
    """Check that every block that the daemon would load from the drive is whole there, whatever
    failed before: it must not trust failed writes. Clients should pause.
    """
    if not scenario.shape.ssd_bytes or DRIVE in scenario.damaged:
        return  # it does not know of damaged records yet
    try:
        said = _calm(scenario)
        there = len(damage.names_on_disk(scenario.ssd_dir))
        later = scenario.daemon.stats()
    except KVHearthError:
        return  # other checks report a daemon that does not answer
    failures(scenario, later)
    if _reclaimed(said) == _reclaimed(later):  # else reclaimed blocks may be overwritten by now
        judge(scenario, _on_ssd(said), there)


def claimed(scenario: Scenario) -> int:
    """Return the number of blocks that the daemon claims to have on the drive, for ``judge`` after
    its death; 0 where the claim means nothing.
    """
    if DRIVE in scenario.damaged or scenario.shape.kind == PRESSED:
        return 0
    try:
        return _on_ssd(scenario.daemon.stats())
    except KVHearthError:
        return 0


def given_up(scenario: Scenario) -> int:
    """Return the number of blocks that the daemon gave up unwritten since its start; -1 without an
    answer.
    """
    try:
        said = scenario.daemon.stats()
    except KVHearthError:
        return -1
    return said.counters.get(IMPATIENT, 0)


def judge(scenario: Scenario, reported_state: int, there: int) -> None:
    """Compare the number of blocks claimed to be on the drive with the number that is whole
    there.
    """
    scenario.report.figures["claims_compared_with_the_drive"] += reported_state
    if there < reported_state:
        text = f"{reported_state} blocks were said to be on the drive, {there} are"
        scenario.report.find(LOST, text, scenario.where, reported_state - there)


def _calm(scenario: Scenario) -> Stats:
    """Return the daemon's statistics once nothing is being written, or after a limited wait. Writes
    between the statistics and the look at the drive would hide missing blocks.
    """
    end = time.monotonic() + _QUIET_S
    while True:
        said = scenario.daemon.stats()
        if not _busy(said) or time.monotonic() > end:
            return said
        time.sleep(_POLL_S)


def _on_ssd(said: Stats) -> int:
    return 0 if said.ssd is None else said.ssd.blocks


def _busy(said: Stats) -> bool:
    ssd = said.ssd
    return ssd is not None and bool(ssd.demoting_blocks or ssd.queued_writes or ssd.recovering)


def _reclaimed(said: Stats) -> int:
    return 0 if said.ssd is None else said.ssd.counters.get("segments_reclaimed", 0)


@dataclass
class _Model:
    epoch: int = -1
    sealed: dict[int, None] = field(default_factory=dict)
    tried: int = 0
    bumped: set[int] = field(default_factory=set)
    begun: set[int] = field(default_factory=set)
    """Blocks being stored by a client, without a result yet."""
    struck: set[int] = field(default_factory=set)
    """Blocks in ``begun`` that a fault may have hit after their commit."""
    spoilt: set[int] = field(default_factory=set)
    """Blocks with a copy damaged by a fault. Until the daemon notices, it takes a store of the same
    block for a duplicate, or for one that is on the drive, and acknowledges it.
    """
    suspects: set[int] = field(default_factory=set)
    """Blocks excused since they were last requested."""


class Oracle:
    """Promised blocks of all models of one world. Thread-safe.

    Args:
        keeps: whether sealed blocks are kept from loss; False where eviction may take any of them.

    Attributes:
        excused: blocks that faults may have taken, by fault.
        vanished: sealed blocks that are gone because the weights epoch rose by itself.
    """

    def __init__(self, *, keeps: bool) -> None:
        self.keeps = keeps
        self.excused: dict[str, int] = {}
        self.vanished = 0
        self._models: dict[str, _Model] = {}
        self._lock = threading.Lock()

    def tried(self, model: str, epoch: int, numbers: Iterable[int]) -> None:
        """Record that a client begins to store blocks."""
        with self._lock:
            one = self._of(model, epoch)
            numbers = list(numbers)
            one.tried += sum(number not in one.sealed for number in numbers)
            one.begun.update(numbers)
            one.struck.difference_update(numbers)

    def bound(self, model: str, epoch: int, numbers: Iterable[int]) -> None:
        """Record blocks that the daemon acknowledged."""
        with self._lock:
            one = self._of(model, epoch)
            numbers = list(numbers)
            one.begun.difference_update(numbers)
            if epoch == one.epoch:
                doubted = one.struck | one.spoilt
                one.sealed.update(dict.fromkeys(n for n in numbers if n not in doubted))

    def bumped(self, model: str, epoch: int) -> None:
        """Record that the kit itself bumped the weights epoch to ``epoch``."""
        with self._lock:
            self._models.setdefault(model, _Model()).bumped.add(epoch)

    def excuse(self, model: str, numbers: Iterable[int], why: str) -> int:
        """Excuse blocks that a fault may have taken, and return how many of them were sealed."""
        with self._lock:
            one = self._models.get(model, _Model())
            numbers = list(numbers)
            gone = [n for n in numbers if n in one.sealed]
            one.struck.update(n for n in numbers if n not in one.sealed)
            one.suspects.update(gone)
            for number in gone:
                del one.sealed[number]
            self._count(why, len(gone))
            return len(gone)

    def spoil(self, model: str, numbers: Iterable[int], why: str) -> int:
        """Excuse blocks as ``excuse`` does, and expect nothing of them until the weights change."""
        with self._lock:
            self._models.setdefault(model, _Model()).spoilt.update(numbers)
        return self.excuse(model, numbers, why)

    def sealed(self, model: str) -> tuple[int, list[int]]:
        """Return (epoch, blocks) that must be there."""
        with self._lock:
            one = self._models.get(model, _Model())
            return one.epoch, list(one.sealed) if self.keeps else []

    def suspects(self, model: str) -> list[int]:
        """Return blocks that may be gone or damaged; if served, they must be right. Spoilt blocks
        are returned each time, the others once.
        """
        with self._lock:
            one = self._models.get(model, _Model())
            found, one.suspects = one.suspects | one.spoilt, set()
            return sorted(found - one.sealed.keys())

    def epoch(self, model: str) -> int:
        """Return the epoch of a model's weights; -1 while unknown."""
        with self._lock:
            return self._models.get(model, _Model()).epoch

    def known(self, model: str) -> list[int]:
        """Return blocks that may be there."""
        with self._lock:
            return list(self._models.get(model, _Model()).sealed)

    def within_reach(self, model: str) -> list[int]:
        """Return blocks that a fault may hit: those that may be there, and those being stored."""
        with self._lock:
            one = self._models.get(model, _Model())
            return [*one.sealed, *(one.begun - one.sealed.keys())]

    @property
    def total(self) -> int:
        """Number of sealed blocks, whether or not they are kept from loss."""
        with self._lock:
            return sum(len(one.sealed) for one in self._models.values())

    def attempts(self) -> int:
        """Return the number of blocks that clients began to store, an upper bound on the blocks
        that take room.
        """
        with self._lock:
            return sum(one.tried for one in self._models.values())

    def _of(self, model: str, epoch: int) -> _Model:
        one = self._models.setdefault(model, _Model())
        if epoch > one.epoch:
            # Blocks of older weights are void; that is intended only if the kit bumped the epoch.
            if epoch not in one.bumped and self.keeps:
                self.vanished += len(one.sealed)
            one.epoch, one.sealed = epoch, {}
            one.spoilt, one.suspects = set(), set()
        return one

    def _count(self, why: str, amount: int) -> None:
        if amount:
            self.excused[why] = self.excused.get(why, 0) + amount
