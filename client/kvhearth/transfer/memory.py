"""Memory of a transfer: the arrays, lists and pool pages that callers pass, checked."""

from __future__ import annotations

import contextlib
import importlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from kvhearth.codec import LOSSLESS
from kvhearth.contract import DTYPE_BYTES, Contract
from kvhearth.copiers import kernels
from kvhearth.copiers.base import CopyKind
from kvhearth.errors import KVHearthError
from kvhearth.model import I64, Bools
from kvhearth.page_layout import PagedKV

_TORCH_NAMES = {"float8_e4m3fn": "fp8_e4m3", "float8_e5m2": "fp8_e5m2"}


@dataclass(frozen=True, eq=False)
class Pages:
    """Some pages of an engine's paged KV pool, copied in place.

    Attributes:
        kv: the pool. Make it once: each one keeps a copier until the cache is closed.
        numbers: n distinct page numbers.
    """

    kv: PagedKV
    numbers: I64 | Sequence[int]


class Source(Protocol):
    """Memory of a transfer: ``stage`` gives pages to copy from or to, ``scatter`` ends a load."""

    device: str
    kept: bool

    def stage(self, kind: CopyKind, positions: I64) -> tuple[PagedKV, I64]:
        """Return the memory of a batch of blocks, and their page numbers in it."""

    def scatter(self, positions: I64, ok: Bools) -> None:
        """Bring the loaded blocks of the last batch to where they belong."""


class PagesInPlace:
    """Pages that are copied in place."""

    def __init__(self, kv: PagedKV, numbers: I64, *, kept: bool) -> None:
        self.device = kv.device
        self.kept = kept
        self._kv = kv
        self._numbers = numbers

    @classmethod
    def of_pool(cls, pages: Pages, count: int, page_bytes: int) -> PagesInPlace:
        """Return a pool's pages, checked."""
        kv, numbers = pages.kv, np.asarray(pages.numbers)
        if kv.page_bytes != page_bytes:
            raise ValueError(
                f"a page has {kv.page_bytes} bytes, the contract's blocks have {page_bytes}"
            )
        if numbers.shape != (count,) or (count and numbers.dtype.kind not in "iu"):
            raise ValueError(
                f"page numbers of shape {numbers.shape} and dtype {numbers.dtype} for {count} keys"
            )
        if count and not 0 <= numbers.min() <= numbers.max() < kv.page_count:
            raise ValueError(f"the pool has pages 0..{kv.page_count - 1}")
        if len(np.unique(numbers)) != count:
            raise ValueError("a page number appears twice")
        return cls(kv, numbers.astype(np.int64), kept=True)

    def stage(self, kind: CopyKind, positions: I64) -> tuple[PagedKV, I64]:
        return self._kv, self._numbers[positions]

    def scatter(self, positions: I64, ok: Bools) -> None:
        """Do nothing: they are there."""


class Scattered:
    """Blocks in memory of their own, moved through a dense copy of each batch."""

    def __init__(self, blocks: Sequence[Any]) -> None:
        self.kept = False
        self._blocks = blocks
        self._dense: Any = None
        self._library: Any = np
        self.device = "cpu"
        if blocks and not isinstance(blocks[0], np.ndarray):
            self._library = importlib.import_module("torch")
            self.device = _device(blocks[0])

    def stage(self, kind: CopyKind, positions: I64) -> tuple[PagedKV, I64]:
        blocks = [self._blocks[index] for index in positions.tolist()]
        shape = (len(blocks), *blocks[0].shape)
        options = {} if self._library is np else {"device": self.device}
        with self._mode():
            self._dense = self._library.empty(shape, dtype=blocks[0].dtype, **options)
            if kind is CopyKind.STORE:
                self._library.stack(blocks, out=self._dense)
        return PagedKV([self._dense]), np.arange(len(positions))

    def scatter(self, positions: I64, ok: Bools) -> None:
        with self._mode():
            for index, row in zip(positions[ok].tolist(), np.flatnonzero(ok).tolist(), strict=True):
                self._blocks[index][...] = self._dense[row]
        if self.device != "cpu":
            self._library.cuda.current_stream(self.device).synchronize()

    def _mode(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which any tensor may be written, also one of inference mode."""
        mode: contextlib.AbstractContextManager[Any] = (
            contextlib.nullcontext() if self._library is np else self._library.inference_mode()
        )
        return mode


def source_of(pages: Any, count: int, contract: Contract, *, written: bool) -> Source:
    """Return the memory of a transfer of ``count`` blocks of the contract's only KV group.

    Raises:
        ValueError, TypeError: see ``Cache``.
    """
    page_bytes = contract.groups[0].engine_bytes
    if isinstance(pages, Pages):
        _check_codec(pages.kv.device, contract.codec)
        return PagesInPlace.of_pool(pages, count, page_bytes)
    blocks = pages if isinstance(pages, list | tuple) else [pages]
    for block in blocks:
        if not isinstance(block, np.ndarray) and not hasattr(block, "data_ptr"):
            raise TypeError(
                f"pages of {type(block).__name__}: pass a numpy array, a torch tensor, a list "
                "of them, or kvhearth.Pages"
            )
        _check_kind(block, contract.kv_dtype)
        if written and isinstance(block, np.ndarray) and not block.flags.writeable:
            raise ValueError("pages are read-only: a load writes them")
        _check_codec(_device(block), contract.codec)
    if blocks is pages:
        listed = _checked_list(pages, count, page_bytes)
        if count and _device(listed[0]) == "cpu" and all(map(_row_major, listed)):
            with contextlib.suppress(ValueError):  # blocks that overlap
                return PagesInPlace(*PagedKV.around(listed), kept=False)
        return Scattered(listed)
    _check_array(pages, count, page_bytes)
    if count and _row_major(pages[0]):
        with contextlib.suppress(KVHearthError):  # read-only, or rows that overlap
            return PagesInPlace(PagedKV([pages]), np.arange(count), kept=False)
    # Other memory is moved through a dense copy: equal elements have equal bytes.
    return Scattered([pages[index : index + 1] for index in range(count)])


def _check_codec(device: str, codec: str) -> None:
    """Refuse a codec for memory that cannot be encoded in this process."""
    if device != "cpu" and codec != LOSSLESS and (reason := kernels.available()):
        raise ValueError(f"codec {codec} for pages on {device}: {reason}")


def _row_major(block: Any) -> bool:
    if isinstance(block, np.ndarray):
        return block.flags.c_contiguous
    return not hasattr(block, "is_contiguous") or bool(block.is_contiguous())


def dtype_name(array: Any) -> str:
    """Return the name of an array's dtype as contracts have it."""
    name = str(array.dtype).removeprefix("torch.")
    return _TORCH_NAMES.get(name, name)


def _check_kind(array: Any, wanted: str) -> None:
    """Refuse another dtype; unsigned words of the same size stand for what numpy does not have."""
    name, device = dtype_name(array), _device(array)
    raw = name == "uint8"
    raw |= name.startswith("uint") and int(array.itemsize) == DTYPE_BYTES[wanted]
    if name != wanted and not raw:
        raise ValueError(f"pages of {name}, the contract's blocks are {wanted}")
    if device != "cpu" and not device.startswith("cuda"):
        raise ValueError(f"pages on {device}: only CPU and CUDA memory can be copied")


def _device(array: Any) -> str:
    return "cpu" if isinstance(array, np.ndarray) else str(array.device)


def _check_array(pages: Any, count: int, page_bytes: int) -> None:
    shape = tuple(pages.shape)
    if not shape or shape[0] != count:
        raise ValueError(f"pages of shape {shape} for {count} keys: dimension 0 is the block")
    got = math.prod(shape[1:]) * int(pages.itemsize)
    if count and got != page_bytes:
        raise ValueError(
            f"pages of shape {shape} and {dtype_name(pages)} have {got} bytes a block, the "
            f"contract says {page_bytes}"
        )


def _checked_list(blocks: Sequence[Any], count: int, page_bytes: int) -> Sequence[Any]:
    """Return a copy of a caller's list."""
    if len(blocks) != count:
        raise ValueError(f"{len(blocks)} pages for {count} keys")
    kinds = {(type(block), block.dtype, tuple(block.shape), _device(block)) for block in blocks}
    if len(kinds) > 1:
        raise ValueError("the pages of a list differ in shape, dtype or device")
    for block in blocks[:1]:
        _check_array(block[None], 1, page_bytes)
    return list(blocks)
