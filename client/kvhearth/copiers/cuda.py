"""Copies between GPU pages and the arena on dedicated streams, completed by events.

Pages that are one run are copied directly. A stacked page (one fragment per layer) is first
gathered on the GPU into a small staging buffer, so that one copy per block crosses the bus and not
one per fragment; loads go the other way. Ragged pages are copied fragment by fragment.

Copies also work before the arena is registered with CUDA (``host_register``), but block the caller
then. The caller's thread only issues copies: a thread of the copier polls the events and computes
the checksums of loads.
"""

from __future__ import annotations

import importlib
import threading
import time
from collections import deque
from dataclasses import dataclass
from logging import ERROR
from typing import Any

import numpy as np

from kvhearth import failpoints as faults
from kvhearth.copiers.base import (
    VERIFY_FRACTION,
    ArenaView,
    BlockFailure,
    CopyKind,
    Done,
    Ticket,
    TicketBook,
    copy_failed,
    deadline_of,
)
from kvhearth.copiers.batch import Batch, HeldArena, as_arrays
from kvhearth.copiers.device import PIECE_BYTES, CopyDevice, TorchCuda
from kvhearth.counters import log_event
from kvhearth.errors import KVHearthError, Reason
from kvhearth.model import I64, Bools, Records, checksum_of
from kvhearth.page_layout import PagedKV, Shape
from kvhearth.worker_thread import SupervisedThread

STAGING_BYTES = 16 << 20
RUN_BYTES_MAX = 64 << 20
POLL_S = 0.0001
POLL_MAX_S = 0.001
"""Bounds of the pause between two polls of the events. The pause is an eighth of the youngest
batch's age within these bounds, since each poll takes the interpreter's lock.
"""
_IDLE_S = 10.0
_JOIN_S = 0.5


@dataclass(eq=False)
class _Flight:
    ticket: Ticket
    batch: Batch
    event: object | None
    started_s: float
    failed: bool


class CudaCopier:
    """The copier for tensors on a GPU; see ``base.Copier`` for its guarantees. Thread-safe.

    Copies are issued in the thread that calls ``store`` or ``load``. A thread of the copier notices
    their end, verifies loads and judges the batch; the other methods make no CUDA calls. Stores are
    not checksummed (``Done.checksums`` is None): the daemon does it. In a forked child the copier
    takes no batches.

    Args:
        kv: the registered pages, on one GPU.
        arena: arena of one boot; a new boot needs a new copier.
        device: interface to CUDA; None for the real one.
        verify_fraction: fraction of loaded blocks whose checksum is compared, drawn at random;
            blocks with ``FLAG_VERIFY`` are compared in any case. One block of 2 MiB costs 60
            microseconds.
        seed: seed of that draw; None for a fresh one.
        queue_max: most batches under way.
        staging_bytes: GPU memory of each direction's staging buffer (at least one page; none unless
            the pages are stacked).
        piece_bytes: size of the pieces in which the arena is registered: no single copy crosses
            such a bound.

    Raises:
        KVHearthError: ``bad_contract`` if the tensors are not on a GPU.
        RuntimeError: the GPU has no memory for the staging buffers, or the CUDA context is broken.
    """

    def __init__(
        self,
        kv: PagedKV,
        arena: ArenaView,
        *,
        device: CopyDevice | None = None,
        verify_fraction: float = VERIFY_FRACTION,
        seed: int | None = None,
        queue_max: int = 64,
        staging_bytes: int = STAGING_BYTES,
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        if device is None and not kv.device.startswith("cuda"):
            raise KVHearthError(
                Reason.BAD_CONTRACT, "the tensors are in CPU memory: use the host copier for them"
            )
        self._kv = kv
        self._arena = HeldArena(arena)
        self._device = device if device is not None else TorchCuda(kv.device)
        self._verify_fraction = verify_fraction
        self._random = np.random.default_rng(seed)
        with self._device.entered():
            self._mover = _CopyKernel(kv, self._arena, self._device, staging_bytes, piece_bytes)
        self._book = TicketBook(queue_max)
        # Copies of two batches must not interleave: they share a staging buffer, in the stream's
        # order.
        self._issuing = threading.Lock()
        self._worker = SupervisedThread("kvhearth-copies", self._step, lambda: None)
        self._changed = self._worker.changed
        self._flights: deque[_Flight] = deque()
        self._worker.start()

    def store(
        self, boot_id: str, pages: I64, extents: Records, *, wait_s: float = 0.0
    ) -> Ticket | None:
        """Issue a store; see ``base.Copier.store``."""
        return self._submit(CopyKind.STORE, boot_id, pages, extents, wait_s)

    def load(
        self, boot_id: str, extents: Records, pages: I64, *, wait_s: float = 0.0
    ) -> Ticket | None:
        """Issue a load; see ``base.Copier.load``."""
        return self._submit(CopyKind.LOAD, boot_id, pages, extents, wait_s)

    def poll(self) -> list[Done]:
        """Return finished batches; see ``base.Copier.poll``."""
        return [] if self._worker.foreign else self._book.claim_all()

    def wait(self, ticket: Ticket, deadline_s: float) -> Done | None:
        """Return one batch's outcome; see ``base.Copier.wait``."""
        return None if self._worker.foreign else self._book.claim(ticket, deadline_s)

    def drain(self, deadline_s: float) -> bool:
        """Wait until nothing is under way; see ``base.Copier.drain``."""
        return self._worker.foreign or self._book.wait_idle(deadline_s)

    def close(self, deadline_s: float = 30.0) -> bool:
        """Take no more batches and wait for the copies to end; see ``base.Copier.close``."""
        if self._worker.foreign:
            return True
        until = deadline_of(deadline_s)
        self._book.close()
        if not self._book.wait_idle(deadline_s):
            return False
        if not self._worker.stop(max(until - time.monotonic(), _JOIN_S)):
            return False
        self._mover.release()
        return True

    def check_books(self) -> None:
        """Raise AssertionError if a batch was lost."""
        self._book.check_books()

    def _submit(
        self, kind: CopyKind, boot_id: str, pages: I64, extents: Records, wait_s: float
    ) -> Ticket | None:
        if self._worker.foreign:
            raise KVHearthError(Reason.CLOSED, "a forked child has no copier: make one there")
        pages, extents = as_arrays(pages, extents)
        ticket = self._book.open(kind, len(extents), wait_s)
        if ticket is None:
            return None
        with self._issuing:
            started_s = time.perf_counter()
            try:
                batch = Batch(self._kv, self._arena, boot_id, pages, extents)
            except Exception:  # noqa: BLE001 - a ticket must always get an outcome
                _log_failure("copy.failed", "a batch could not be begun", blocks=len(extents))
                self._book.finish(copy_failed(ticket))
                return ticket
            event, failed = self._issue(ticket.kind, batch)
            with self._changed:
                self._flights.append(_Flight(ticket, batch, event, started_s, failed))
                self._changed.notify_all()
        return ticket

    def _issue(self, kind: CopyKind, batch: Batch) -> tuple[object | None, bool]:
        """Issue the copies of a batch; return the event after them and whether issuing failed."""
        failed = False
        try:
            with self._device.entered():
                try:
                    with self._device.issuing(kind):
                        self._mover.issue(kind, batch)
                except Exception:  # noqa: BLE001 - a batch must always get an outcome
                    _log_failure("copy.failed", "copies could not be issued", blocks=len(batch))
                    failed = True
                # Recorded even after a failure: copies that were issued before it are still under
                # way.
                return self._device.record(kind), failed
        except Exception:  # noqa: BLE001 - a ticket must always get an outcome
            _log_failure("cuda.broken", "the CUDA context is broken")
            return None, True

    # -- the thread --------------------------------------------------------------------------------

    def _step(self) -> None:
        """Finish the batches whose copies have ended."""
        with self._changed:
            self._changed.wait_for(lambda: self._flights or self._worker.stopping, _IDLE_S)
            flights = list(self._flights)
        if not flights:
            return
        ended = self._ended(flights)
        for flight in ended:
            outcome = self._outcome(flight)
            with self._changed:
                self._flights.remove(flight)
            self._book.finish(outcome)
        if not ended:
            age_s = time.perf_counter() - flights[-1].started_s
            time.sleep(min(max(age_s / 8, POLL_S), POLL_MAX_S))

    def _ended(self, flights: list[_Flight]) -> list[_Flight]:
        """Return the batches whose copies have ended; those of one kind end in their order."""
        ended = []
        under_way: set[CopyKind] = set()
        try:
            with self._device.entered():
                for flight in flights:
                    if flight.ticket.kind not in under_way and self._has_ended(flight):
                        ended.append(flight)
                    else:
                        under_way.add(flight.ticket.kind)
        except RuntimeError:
            _log_failure("cuda.broken", "the CUDA context is broken")
            for flight in flights:
                flight.failed = True
            return flights
        return ended

    def _has_ended(self, flight: _Flight) -> bool:
        if flight.event is None:
            return True
        try:
            return self._device.is_done(flight.event)
        except RuntimeError:
            _log_failure("copy.failed", "a batch failed", blocks=flight.ticket.count)
            flight.failed = True
            return True

    def _outcome(self, flight: _Flight) -> Done:
        try:
            return self._judged(flight)
        except Exception:  # noqa: BLE001 - a ticket must always get an outcome
            _log_failure("copy.failed", "a batch could not be judged", blocks=flight.ticket.count)
            return copy_failed(flight.ticket)

    def _judged(self, flight: _Flight) -> Done:
        batch = flight.batch
        if flight.failed:
            batch.fail_all(BlockFailure.COPY_FAILED)
        elif flight.ticket.kind is CopyKind.LOAD:
            self._verify(batch)
        batch.judge()
        faults.hit(f"copier.{flight.ticket.kind}_done")
        return batch.done(flight.ticket, None, time.perf_counter() - flight.started_s)

    def _verify(self, batch: Batch) -> None:
        """Compare sampled and due checksums with the slots' bytes, which the generations guard."""
        sampled: Bools = self._random.random(len(batch)) < self._verify_fraction
        for position, wanted in batch.expected(sampled).items():
            record = batch.extents[position]
            start = int(record["offset"])
            view = self._arena.views[int(record["segment"])]
            if checksum_of(view[start : start + self._kv.page_bytes].data) != wanted:
                batch.fail_one(position, BlockFailure.CHECKSUM_MISMATCH)


class _CopyKernel:
    """Issues a batch's copies on the current stream, in the way that suits the pages' shape."""

    def __init__(
        self,
        kv: PagedKV,
        arena: HeldArena,
        device: CopyDevice,
        staging_bytes: int,
        piece_bytes: int,
    ) -> None:
        self._torch: Any = importlib.import_module("torch")
        self._kv = kv
        self._piece_bytes = piece_bytes
        self._parts = kv.torch_parts()
        self._stack: Any | None = None
        self._arena_bytes: dict[int, Any] = {
            segment: self._torch.from_numpy(view) for segment, view in arena.views.items()
        }
        self._staging: dict[CopyKind, Any] = {}
        self._staging_blocks = max(1, staging_bytes // kv.page_bytes)
        stack = kv.torch_stack()
        if stack is not None:
            self._stack = stack.view(self._word_dtype())
            shape = (self._staging_blocks, kv.page_bytes)
            # One buffer per direction, reused in stream order: no allocation while the engine runs.
            # It is allocated on the stream that uses it: memory freed on another stream may still
            # be in use by kernels there.
            for kind in CopyKind:
                with device.issuing(kind):
                    self._staging[kind] = self._torch.empty(
                        shape, dtype=self._torch.uint8, device=stack.device
                    )

    def release(self) -> None:
        """Free the arena's memory and the staging buffers."""
        self._arena_bytes.clear()
        self._staging.clear()

    def issue(self, kind: CopyKind, batch: Batch) -> None:
        """Issue all copies of the batch's ok blocks."""
        if self._stack is not None:
            self._issue_stacked(kind, batch)
        elif self._kv.shape is Shape.SINGLE:
            self._issue_single(kind, batch)
        else:
            self._issue_fragments(kind, batch)
        for _ in batch.positions():
            faults.hit(f"copier.{kind}_block")

    def _issue_single(self, kind: CopyKind, batch: Batch) -> None:
        part, page_bytes = self._kv.parts[0], self._kv.page_bytes
        # Pages with gaps between them would go through a temporary: copy them one by one.
        blocks_max = max(1, RUN_BYTES_MAX // page_bytes) if part.stride_bytes == page_bytes else 1
        for run in batch.runs(blocks_max, dense=True, piece_bytes=self._piece_bytes):
            count = len(run.positions)
            pages = self._parts[0][run.page : run.page + count].view(-1)
            self._copy(kind, pages, run.segment, run.offset)

    def _issue_stacked(self, kind: CopyKind, batch: Batch) -> None:
        assert self._stack is not None
        chosen = batch.positions()
        # Non-blocking, else the caller would wait for everything on the stream; the driver copies
        # this small pageable array before the call returns.
        every_index = self._torch.from_numpy(batch.pages[chosen]).to(
            self._stack.device, non_blocking=True
        )
        for start in range(0, len(chosen), self._staging_blocks):
            positions = chosen[start : start + self._staging_blocks]
            staging = self._staging[kind][: len(positions)]
            words = staging.view(self._stack.dtype).view(-1, *self._stack.shape[1:])
            index = every_index[start : start + self._staging_blocks]
            if kind is CopyKind.STORE:
                self._torch.index_select(self._stack, 0, index, out=words)
            row = 0
            for run in batch.runs(
                len(positions),
                positions=positions,
                follow_pages=False,
                dense=True,
                piece_bytes=self._piece_bytes,
            ):
                count = len(run.positions)
                self._copy(kind, staging[row : row + count].view(-1), run.segment, run.offset)
                row += count
            if kind is CopyKind.LOAD:
                self._stack.index_copy_(0, index, words)

    def _issue_fragments(self, kind: CopyKind, batch: Batch) -> None:
        for run in batch.runs(1):
            for part, pages in zip(self._kv.parts, self._parts, strict=True):
                self._copy(kind, pages[run.page], run.segment, run.offset + part.start_bytes)

    def _copy(self, kind: CopyKind, on_device: Any, segment: int, offset: int) -> None:
        """Copy one run of bytes, cut where a registered piece ends: CUDA refuses to cross it."""
        arena, done, length = self._arena_bytes[segment], 0, len(on_device)
        while done < length:
            start = offset + done
            count = min(length - done, self._piece_bytes - start % self._piece_bytes)
            in_arena, pages = arena[start : start + count], on_device[done : done + count]
            if kind is CopyKind.STORE:
                in_arena.copy_(pages, non_blocking=True)
            else:
                pages.copy_(in_arena, non_blocking=True)
            done += count

    def _word_dtype(self) -> Any:
        """Return the widest word that fits the fragments: single bytes are slow on a GPU."""
        first, second = self._kv.parts[:2]
        spacing_bytes = second.address - first.address
        numbers = (first.address, first.run_bytes, first.stride_bytes, spacing_bytes)
        for dtype in (self._torch.int64, self._torch.int32, self._torch.int16):
            if all(number % dtype.itemsize == 0 for number in numbers):
                return dtype
        return self._torch.uint8


def _log_failure(event: str, text: str, **fields: object) -> None:
    log_event(ERROR, event, text, trace=True, **fields)
