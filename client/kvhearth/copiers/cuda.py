"""Copies between GPU pages and the arena, issued and verified on a thread of the copier.

The caller's thread only records an event. The copier's thread builds all descriptors of a batch
(``descriptors``), lets a stream of the lowest priority wait for the event, and submits portion by
portion with the method that suits their fragments (``methods``), so that few bytes are under way
in each direction. It notices their end, verifies loads and judges the batch.

Copies also work before their part of the arena is registered with CUDA
(``device.ArenaRegistration``), one call a copy; they block the copier's thread then.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from logging import ERROR, WARNING
from typing import NamedTuple

import numpy as np

from kvhearth import failpoints as faults
from kvhearth.clock import REAL_TIME, Clock
from kvhearth.codec import Encoding
from kvhearth.copiers.base import (
    VERIFY_FRACTION,
    ArenaView,
    BlockFailure,
    CopyKind,
    Done,
    Ticket,
    copy_failed,
)
from kvhearth.copiers.batch import Batch, EncodedSizes, HeldArena, Sizes
from kvhearth.copiers.descriptors import Descriptors, Portion
from kvhearth.copiers.device import PIECE_BYTES, CopyDevice, Event, index_of
from kvhearth.copiers.encoded import EncodedDescriptors
from kvhearth.copiers.measure import measured_device
from kvhearth.copiers.methods import AUTO, CopyMethod, choose, requested
from kvhearth.copiers.queued import Job, QueuedCopier
from kvhearth.counters import log_event
from kvhearth.errors import KVHearthError, Reason
from kvhearth.model import Bools, checksum_of
from kvhearth.page_layout import PagedKV
from kvhearth.worker_thread import SupervisedThread

VERIFY_STEP_BYTES = 8 << 20
"""Bytes whose checksums are compared before the thread looks at its streams again."""
POLL_S = 0.0001
POLL_MAX_S = 0.001
"""Bounds of the pause between two polls of the events. The pause is an eighth of the youngest
submission's age within these bounds, since each poll takes the interpreter's lock.
"""
REFILL_S = 0.00025
"""Pause between polls while portions wait: the other half of the window lasts longer."""
REGISTERED_LOOK_S = 0.05
"""Pause between two looks whether a piece of the arena is registered."""
_IDLE_S = 10.0


class _UnderWay(NamedTuple):
    """A portion that was submitted; without an event the CUDA context is broken."""

    event: Event | None
    size_bytes: int


@dataclass(eq=False)
class _Flight:
    """A batch on the thread: portions to submit, portions under way, then checksums to compare."""

    ticket: Ticket
    batch: Batch
    mark: object
    started_s: float
    portions: deque[Portion] = field(default_factory=deque)
    under_way: deque[_UnderWay] = field(default_factory=deque)
    ordered: bool = False
    failed: bool = False
    checks: Iterator[tuple[int, bytes]] | None = None


class CudaCopier(QueuedCopier):
    """The copier for tensors on a GPU; see ``base.Copier`` for its guarantees. Thread-safe.

    Only the copier's thread makes CUDA calls, except for the event that ``store`` and ``load``
    record if they are given none. Stores are not checksummed (``Done.checksums`` is None): the
    daemon does it. In a forked child the copier takes no batches.

    Args:
        kv: the registered pages, on one GPU.
        arena: arena of one boot; a new boot needs a new copier.
        device: streams of the GPU; None for the process's own.
        method: ``loop``, ``batch``, ``kernel`` or ``auto`` (the environment's, else by what was
            measured). A method that the machine lacks is logged, and ``auto`` is used.
        encoding: codec of the blocks in the arena; None for blocks as they are in the pages. It
            takes a portion's GPU memory for each direction.
        verify_fraction: fraction of loaded blocks whose checksum is compared, drawn at random;
            blocks with ``FLAG_VERIFY`` are compared in any case. One block of 2 MiB costs 60
            microseconds.
        seed: seed of that draw; None for a fresh one.
        queue_max: most batches under way.
        piece_bytes: size of the pieces in which the arena is registered: no single copy crosses
            such a bound.
        clock: times the looks at pieces that are not registered.

    Raises:
        KVHearthError: ``bad_contract`` if the tensors are not on a GPU or cannot be encoded,
            ``copy_failed`` if torch has no CUDA, ``config_invalid`` for a bad ``method``.
        RuntimeError: the GPU has no memory for encoded blocks.
    """

    def __init__(  # noqa: PLR0913 - options of the constructor, each by name
        self,
        kv: PagedKV,
        arena: ArenaView,
        *,
        device: CopyDevice | None = None,
        method: str = AUTO,
        encoding: Encoding | None = None,
        verify_fraction: float = VERIFY_FRACTION,
        seed: int | None = None,
        queue_max: int = 64,
        piece_bytes: int = PIECE_BYTES,
        clock: Clock = REAL_TIME,
    ) -> None:
        if device is None and not kv.device.startswith("cuda"):
            raise KVHearthError(
                Reason.BAD_CONTRACT, "the tensors are in CPU memory: use the host copier for them"
            )
        self._kv: Sizes = kv
        self._arena = HeldArena(arena)
        self._wanted = requested(method)
        self._device = measured_device(index_of(kv.device)) if device is None else device
        self._descriptors: Descriptors | EncodedDescriptors
        if encoding is None:
            self._descriptors = Descriptors(
                kv, self._arena, piece_bytes, portion_bytes=self._device.portion_bytes
            )
        else:
            self._kv = EncodedSizes(kv.page_count, encoding.stored_bytes)
            self._descriptors = EncodedDescriptors(
                kv, self._arena, piece_bytes, encoding, self._device
            )
        self._registered = _Registered(self._device, self._arena, piece_bytes, clock)
        self._verify_fraction = verify_fraction
        self._random = np.random.default_rng(seed)
        super().__init__(queue_max)
        self._worker = SupervisedThread("kvhearth-copies", self._step, self._recover)
        self._changed = self._worker.changed
        self._jobs: deque[Job] = deque()
        self._flights: list[_Flight] = []
        self._worker.start()

    def mark(self) -> object:
        return self._device.mark()

    def _take(self, job: Job) -> None:
        with self._changed:
            self._jobs.append(job)
            self._changed.notify_all()

    # -- the thread --------------------------------------------------------------------------------

    def _step(self) -> None:
        """Advance all batches, then rest until there is more to do."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._jobs or self._flights or self._worker.stopping, _IDLE_S
            )
            jobs = list(self._jobs)
            self._jobs.clear()
        for job in jobs:
            self._begin(job)
        if not self._flights:
            return
        try:
            with self._device.entered():
                advanced = self._advance()
        except RuntimeError:
            _log_failure("cuda.broken", "the CUDA context is broken")
            self._fail_all()
            advanced = True
        for flight in [each for each in self._flights if _has_ended(each)]:
            self._finish(flight)
            advanced = True
        if not advanced:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._worker.stopping, self._pause_s())

    def _begin(self, job: Job) -> None:
        started_s = time.perf_counter()
        try:
            batch = Batch(self._kv, self._arena, job.boot_id, job.pages, job.extents)
            if job.ticket.kind is CopyKind.STORE:
                batch.populate()
            flight = _Flight(job.ticket, batch, job.mark, started_s)
            flight.portions.extend(
                self._descriptors.portions(job.ticket.kind, batch, np.flatnonzero(batch.ok))
            )
        except Exception:  # noqa: BLE001 - a ticket must always get an outcome
            _log_failure("copy.failed", "a batch could not be begun", blocks=job.ticket.count)
            self._book.finish(copy_failed(job.ticket))
            return
        self._flights.append(flight)

    def _advance(self) -> bool:
        """Submit what the windows allow, and take portions that have ended.

        Returns:
            Whether anything has changed.
        """
        advanced = False
        for kind in CopyKind:
            flights = [flight for flight in self._flights if flight.ticket.kind is kind]
            # One stream of each kind: portions end in the order of their submission.
            for flight in flights:
                while flight.under_way and self._has_passed(flight):
                    self._retire(flight)
                    advanced = True
                if flight.under_way:
                    break
            for flight in flights:
                while flight.portions and self._submit_next(flight):
                    advanced = True
                if flight.portions:
                    break
            else:
                self._device.withdraw(kind, self)
        return advanced

    def _has_passed(self, flight: _Flight) -> bool:
        event = flight.under_way[0].event
        if event is None:
            return True
        try:
            return self._device.is_done(event)
        except RuntimeError:
            _log_failure("copy.failed", "a batch failed", blocks=flight.ticket.count)
            self._abandon(flight)
            return True

    def _retire(self, flight: _Flight) -> None:
        """Forget the oldest portion under way of a batch."""
        portion = flight.under_way.popleft()
        self._device.release(flight.ticket.kind, portion.size_bytes)

    def _submit_next(self, flight: _Flight) -> bool:
        """Submit the next portion of a batch; False if the window is full."""
        kind, batch, portion = flight.ticket.kind, flight.batch, flight.portions[0]
        batch.check_generations(portion.positions)
        if not batch.ok[portion.positions].all():
            # A slot that was reassigned must not be written: the rest is planned without it.
            rest = np.unique(np.concatenate([each.positions for each in flight.portions]))
            flight.portions = deque(self._descriptors.portions(kind, batch, rest[batch.ok[rest]]))
            return True
        if not self._device.reserve(kind, portion.size_bytes, self):
            return False
        flight.portions.popleft()
        self._submit_portion(flight, portion)
        return True

    def _submit_portion(self, flight: _Flight, portion: Portion) -> None:
        kind = flight.ticket.kind
        try:
            if not flight.ordered:
                self._device.wait(kind, flight.mark)
                flight.ordered = True
            registered = self._registered.holds(kind, portion)
            method = self._method(kind, portion) if registered else CopyMethod.LOOP
            if portion.recoding is not None and kind is CopyKind.STORE:
                self._device.recode(kind, portion.recoding)
            self._device.submit(kind, method, portion.copies, registered)
            if portion.recoding is not None and kind is CopyKind.LOAD:
                self._device.recode(kind, portion.recoding)
        except Exception:  # noqa: BLE001 - a batch must always get an outcome
            _log_failure("copy.failed", "copies could not be issued", blocks=flight.ticket.count)
            self._abandon(flight)
        # Recorded even after a failure: copies that were issued before it are still under way.
        try:
            event = self._device.record(kind)
        except RuntimeError:
            _log_failure("cuda.broken", "the CUDA context is broken")
            self._abandon(flight)
            event = None
        flight.under_way.append(_UnderWay(event, portion.size_bytes))
        for _ in portion.positions:
            faults.hit(f"copier.{kind}_block")

    def _method(self, kind: CopyKind, portion: Portion) -> CopyMethod:
        problems = self._device.problems
        if self._wanted != AUTO and problems[CopyMethod(self._wanted)]:
            log_event(
                WARNING,
                "copy.method_missing",
                "another method is used",
                method=self._wanted,
                error=problems[CopyMethod(self._wanted)],
            )
            self._wanted = AUTO
        fragment_bytes = portion.size_bytes / len(portion.copies.sizes)
        return choose(kind, fragment_bytes, self._wanted, problems, self._device.rates)

    def _abandon(self, flight: _Flight) -> None:
        """Submit nothing more of a batch that failed; portions under way are still waited for."""
        flight.failed = True
        flight.portions.clear()
        self._device.withdraw(flight.ticket.kind, self)

    def _recover(self) -> None:
        """Give up all batches after a step that raised; what is under way is still waited for."""
        for flight in self._flights:
            self._abandon(flight)

    def _fail_all(self) -> None:
        """Give up all batches: nothing is copied in a broken context."""
        for flight in self._flights:
            self._abandon(flight)
            while flight.under_way:
                self._retire(flight)

    def _pause_s(self) -> float:
        age_s = time.perf_counter() - self._flights[-1].started_s
        waiting = any(flight.portions for flight in self._flights)
        return REFILL_S if waiting else min(max(age_s / 8, POLL_S), POLL_MAX_S)

    def _finish(self, flight: _Flight) -> None:
        """Compare some checksums of a batch whose copies have ended; report it after the last."""
        try:
            if not self._verified(flight):
                return
            outcome = self._judged(flight)
        except Exception:  # noqa: BLE001 - a ticket must always get an outcome
            _log_failure("copy.failed", "a batch could not be judged", blocks=flight.ticket.count)
            outcome = copy_failed(flight.ticket)
        self._flights.remove(flight)
        self._book.finish(outcome)

    def _verified(self, flight: _Flight) -> bool:
        """Compare the next sampled and due checksums with the slots' bytes, which the generations
        guard; return whether all were compared.
        """
        batch = flight.batch
        if flight.failed or flight.ticket.kind is CopyKind.STORE:
            return True
        if flight.checks is None:
            sampled: Bools = self._random.random(len(batch)) < self._verify_fraction
            flight.checks = iter(batch.expected(sampled).items())
        left_bytes = VERIFY_STEP_BYTES
        for position, wanted in flight.checks:
            record = batch.extents[position]
            start = int(record["offset"])
            view = self._arena.views[int(record["segment"])]
            if checksum_of(view[start : start + self._kv.page_bytes].data) != wanted:
                batch.fail_one(position, BlockFailure.CHECKSUM_MISMATCH)
            left_bytes -= self._kv.page_bytes
            if left_bytes <= 0:
                return False
        return True

    def _judged(self, flight: _Flight) -> Done:
        batch = flight.batch
        if flight.failed:
            batch.fail_all(BlockFailure.COPY_FAILED)
        batch.judge()
        faults.hit(f"copier.{flight.ticket.kind}_done")
        return batch.done(flight.ticket, None, time.perf_counter() - flight.started_s)


class _Registered:
    """The pieces of the arena that are registered with CUDA, however that came about.

    Registered pieces stay so until the copiers are closed: each is looked at until it is.
    """

    def __init__(
        self, device: CopyDevice, arena: HeldArena, piece_bytes: int, clock: Clock
    ) -> None:
        self._device = device
        self._clock = clock
        pieces = [
            arena.bases[segment] + offset
            for segment, view in arena.views.items()
            for offset in range(0, view.nbytes, piece_bytes)
        ]
        self._pieces = np.array(sorted(pieces), np.int64)
        # The others, with the time of the next look at each.
        self._missing = dict.fromkeys(pieces, 0.0)

    def holds(self, kind: CopyKind, portion: Portion) -> bool:
        """Return whether all copies of a portion are in such pieces; called inside ``entered``."""
        if not self._missing:
            return True
        copies, now = portion.copies, self._clock.now()
        # No copy crosses from one piece into another.
        ours = copies.targets if kind is CopyKind.STORE else copies.sources
        at = np.unique(np.searchsorted(self._pieces, ours, "right")) - 1
        for piece in self._pieces[at].tolist():
            look_s = self._missing.get(piece)
            if look_s is None:
                continue
            # A look may wait for the driver: one that finds nothing is the last one.
            if now < look_s:
                return False
            if not self._device.runtime.is_registered(piece):
                self._missing[piece] = now + REGISTERED_LOOK_S
                return False
            del self._missing[piece]
        return True


def _has_ended(flight: _Flight) -> bool:
    return not flight.portions and not flight.under_way


def _log_failure(event: str, text: str, **fields: object) -> None:
    log_event(ERROR, event, text, trace=True, **fields)
