"""Measures the methods of copying, once for each kind of GPU and driver, in the background.

It takes about a second of a thread of its own. Each method must also return the bytes that it was
given: one that fails or garbles them is not used.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from logging import INFO, WARNING
from pathlib import Path

import numpy as np

from kvhearth.copiers.base import CopyKind
from kvhearth.copiers.cudart import Scratch
from kvhearth.copiers.descriptors import COPIES_MAX, Copies
from kvhearth.copiers.device import CopyDevice, device_of
from kvhearth.copiers.methods import (
    AUTO,
    FRAGMENT_BYTES,
    CopyMethod,
    Rates,
    load_rates,
    rates_path,
    requested,
    save_rates,
)
from kvhearth.counters import log_event
from kvhearth.worker_thread import SupervisedThread

SCRATCH_BYTES = 16 << 20
TOTAL_S = 1.0
"""Time for all measurements, without what a first use compiles or loads."""
_CELL_S = 0.02
_STUCK_S = 5.0
_PAUSE_S = 0.00005


class Measurement:
    """Measures a GPU's methods from its construction on, unless they are remembered.

    The result becomes ``device.rates``.

    Args:
        device: the GPU.
        path: file of remembered rates.
        clock: monotonic time in seconds.
        scratch_bytes: memory taken on each side meanwhile.
    """

    def __init__(
        self,
        device: CopyDevice,
        path: Path,
        *,
        clock: Callable[[], float] = time.monotonic,
        scratch_bytes: int = SCRATCH_BYTES,
    ) -> None:
        self._device = device
        self._path = path
        self._clock = clock
        self._scratch_bytes = scratch_bytes
        self._ended = False
        self._worker = SupervisedThread("kvhearth-measure", self._step, self._give_up)
        self._worker.start()

    def wait(self, deadline_s: float) -> bool:
        """Wait up to ``deadline_s`` seconds for the end of the work; True if it has ended."""
        with self._worker.changed:
            return self._worker.changed.wait_for(
                lambda: self._ended or self._worker.stopping, max(deadline_s, 0.0)
            )

    def _step(self) -> None:
        with self._device.entered():
            identity = self._device.runtime.identity(self._device.index)
            offered = {method for method, why in self._device.problems.items() if not why}
            rates = load_rates(self._path, identity)
            # Another version of torch or Triton may bring a method, or take one away.
            if rates is None or rates.methods() != offered:
                rates = self._measured(offered)
                save_rates(self._path, identity, rates)
                log_event(INFO, "copy.rates_measured", "copies were measured", gpu=identity)
        self._device.rates = rates
        self._end()

    def _give_up(self) -> None:
        log_event(WARNING, "copy.rates_unknown", "copies could not be measured")
        self._end()

    def _end(self) -> None:
        with self._worker.changed:
            self._ended = True
            self._worker.changed.notify_all()
        self._worker.stop(0.0)

    def _measured(self, offered: set[CopyMethod]) -> Rates:
        scratch = self._device.runtime.scratch(self._device.index, self._scratch_bytes)
        values = {
            kind: {method: [0.0] * len(FRAGMENT_BYTES) for method in sorted(offered)}
            for kind in CopyKind
        }
        right = {method for method in sorted(offered) if self._is_right(method, scratch)}
        # Size by size: a machine that runs out of time knows all methods at the smaller ones.
        cells = [
            (at, kind, method)
            for at in range(len(FRAGMENT_BYTES))
            for kind in CopyKind
            for method in sorted(right)
        ]
        until = self._clock() + TOTAL_S
        for at, kind, method in cells:
            if self._worker.stopping:
                break
            if self._clock() < until:
                values[kind][method][at] = self._rate(kind, method, at, scratch)
            elif at:
                values[kind][method][at] = values[kind][method][at - 1]
        return Rates(
            {
                kind: {method: tuple(row) for method, row in rates.items()}
                for kind, rates in values.items()
            }
        )

    def _rate(self, kind: CopyKind, method: CopyMethod, at: int, scratch: Scratch) -> float:
        """Return GB/s of scattered fragments of one size, the host's time included."""
        copies = _scattered(kind, scratch, FRAGMENT_BYTES[at])
        if not len(copies.sizes):
            return 0.0
        moved_bytes, began = 0, self._clock()
        while True:
            self._run(kind, method, copies)
            moved_bytes += int(copies.sizes.sum())
            seconds = self._clock() - began
            if seconds >= _CELL_S or self._worker.stopping:
                return round(moved_bytes / max(seconds, 1e-9) / 1e9, 3)

    def _is_right(self, method: CopyMethod, scratch: Scratch) -> bool:
        """Whether bytes come back as they were sent; this also loads and compiles the method."""
        size_bytes = FRAGMENT_BYTES[0]
        wanted = np.random.default_rng(1).integers(0, 256, len(scratch.host), np.uint8)
        try:
            for kind in (CopyKind.LOAD, CopyKind.STORE):
                scratch.host[:] = wanted if kind is CopyKind.LOAD else 0
                self._run(kind, method, _scattered(kind, scratch, size_bytes))
        except RuntimeError as error:
            log_event(WARNING, "copy.method_failed", "not used", method=method, error=error)
            return False
        touched = np.zeros(len(wanted), np.bool_)
        for address in _scattered(CopyKind.STORE, scratch, size_bytes).targets.tolist():
            start = address - int(scratch.host.ctypes.data)
            touched[start : start + size_bytes] = True
        if (scratch.host == np.where(touched, wanted, 0)).all():
            return True
        log_event(WARNING, "copy.method_failed", "not used", method=method, error="wrong bytes")
        return False

    def _run(self, kind: CopyKind, method: CopyMethod, copies: Copies) -> None:
        """Copy and wait for the end.

        Raises:
            RuntimeError: it was refused, failed or hangs.
        """
        self._device.submit(kind, method, copies, registered=True)
        event, until = self._device.record(kind), time.monotonic() + _STUCK_S
        while not self._device.is_done(event):
            if time.monotonic() > until:
                raise RuntimeError("copies do not end")
            time.sleep(_PAUSE_S)


def _scattered(kind: CopyKind, scratch: Scratch, size_bytes: int) -> Copies:
    """Return copies of every second fragment, in falling order on one side."""
    count = min(len(scratch.host) // (2 * size_bytes), COPIES_MAX)
    begins = np.arange(count, dtype=np.int64) * 2 * size_bytes
    in_host = begins + int(scratch.host.ctypes.data)
    on_device = begins[::-1] + scratch.address
    sizes = np.full(count, size_bytes, np.int64)
    if kind is CopyKind.STORE:
        return Copies(on_device.copy(), in_host, sizes)
    return Copies(in_host, on_device.copy(), sizes)


@functools.cache
def measured_device(index: int) -> CopyDevice:
    """Return the process's device of that number, whose methods are measured unless one is set.

    Raises:
        KVHearthError: ``copy_failed`` if torch has no CUDA, ``config_invalid`` for a bad
            environment.
    """
    device = device_of(index)
    if requested() == AUTO:
        Measurement(device, rates_path())
    return device
