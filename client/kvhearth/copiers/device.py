"""Streams and events of one GPU, as the copier needs them."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

from kvhearth.copiers.base import CopyKind


class CopyDevice(Protocol):
    """The door to CUDA's streams and events; all else that the copier does is plain torch."""

    def issuing(self, kind: CopyKind) -> AbstractContextManager[None]:
        """Make the stream of ``kind`` current, ordered after all work of the caller's stream."""

    def record(self, kind: CopyKind) -> object:
        """An event after all work on the stream of ``kind``.

        Raises:
            RuntimeError: the CUDA context is broken; nothing is copied any more.
        """

    def is_done(self, event: object) -> bool:
        """Whether the event has passed; does not block.

        Raises:
            RuntimeError: the work before it failed.
        """


class TorchCuda:
    """``CopyDevice`` by torch.

    Args:
        device: such as ``"cuda:0"``.
    """

    def __init__(self, device: str) -> None:
        self._torch: Any = importlib.import_module("torch")
        self._device = device
        # 0 is CUDA's lowest priority: copies give way to the engine's kernels.
        self._streams = {
            kind: self._torch.cuda.Stream(device=device, priority=0) for kind in CopyKind
        }

    @contextmanager
    def issuing(self, kind: CopyKind) -> Iterator[None]:
        """See ``CopyDevice.issuing``."""
        cuda, stream = self._torch.cuda, self._streams[kind]
        # Loads wait, too: the page's last owner, or its zeroing, may still run on the engine's
        # stream.
        stream.wait_stream(cuda.current_stream(self._device))
        with cuda.stream(stream):
            yield

    def record(self, kind: CopyKind) -> object:
        """See ``CopyDevice.record``."""
        event = self._torch.cuda.Event()
        event.record(self._streams[kind])
        return event

    def is_done(self, event: object) -> bool:
        """See ``CopyDevice.is_done``."""
        done: bool = event.query()  # type: ignore[attr-defined]
        return done
