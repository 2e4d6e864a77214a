"""Memory layout of an engine's KV pages, as bytes, without a copy and without importing torch.

An engine registers tensors whose first dimension counts its pages. Page ``p`` of a tensor is one
run of bytes; the shard of a block that lives in page ``p`` is the concatenation of those runs in
the order of the tensors. Three shapes are distinguished, because two of them allow one large copy
per block instead of one per fragment:

* ``single``: one run per page (one tensor, or layers that lie side by side inside each page);
* ``stacked``: equal runs at equal distances, ``[layers, pages, ...]``: a strided view (layers,
  pages, bytes);
* ``ragged``: anything else, one copy per tensor and block.
"""

from __future__ import annotations

import enum
import itertools
import mmap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kvhearth.errors import KVHearthError, Reason
from kvhearth.model import I64, U8
from kvhearth.prefault import Span

SHARD_BYTES_MAX = 1 << 30
"""Largest shard. An extent's length is a u32, and a contract's page has the same bound."""
TENSORS_MAX = 65536


class Shape(enum.StrEnum):
    """Relative position of the runs of one page (see the module's docstring)."""

    SINGLE = "single"
    STACKED = "stacked"
    RAGGED = "ragged"


@dataclass(frozen=True)
class Part:
    """Runs of equal length, one per page.

    Attributes:
        address: address of page 0, on ``PagedKV.device``.
        run_bytes: bytes of one page in this part.
        stride_bytes: distance from one page to the next, at least ``run_bytes``.
        start_bytes: offset of the run inside the shard.
        storage: address of the torch storage that holds the part, 0 for numpy.
    """

    address: int
    run_bytes: int
    stride_bytes: int
    start_bytes: int
    storage: int

    @property
    def end_bytes(self) -> int:
        """Offset of the run's end inside the shard."""
        return self.start_bytes + self.run_bytes


class PagedKV:
    """The pages of one KV cache group on one rank.

    The caller guarantees that the tensors are neither freed nor resized while this object lives (it
    holds references to them). Registering copies nothing and reads no element.

    Args:
        tensors: torch tensors (all on one CPU or CUDA device) or writable numpy arrays, in shard
            order. Dimension 0 of each is the engine's page, and one page is one run of bytes: the
            other dimensions are dense in memory, in any order of dimensions (the order is part of
            the contract's ``layout``).

    Attributes:
        page_count: number of engine pages.
        page_bytes: bytes of one shard: the sum over tensors.
        device: ``"cpu"`` or ``"cuda:N"``.
        shape: decides how pages are copied.
        parts: runs in shard order; neighbours in memory are merged, so there may be fewer parts
            than tensors.

    Raises:
        KVHearthError: ``bad_contract`` naming the tensor and its problem.
    """

    def __init__(self, tensors: Sequence[Any], *, _overlapping: bool = False) -> None:
        if not 1 <= len(tensors) <= TENSORS_MAX:
            raise _bad(f"{len(tensors)} tensors are registered, register 1..{TENSORS_MAX}")
        self._tensors = tuple(tensors)
        described = [
            _describe(tensor, index, _overlapping) for index, tensor in enumerate(self._tensors)
        ]
        self.page_count = _same([item.page_count for item in described], "page count")
        self.device = _same([item.device for item in described], "device")
        parts: list[Part] = []
        for item in described:
            _append_merged(parts, item.part, self.page_count)
        self.parts = tuple(parts)
        self.page_bytes = parts[-1].end_bytes
        if self.page_bytes > SHARD_BYTES_MAX:
            raise _bad(
                f"a page has {self.page_bytes} bytes, at most {SHARD_BYTES_MAX}: split the group"
            )
        self._spacing_bytes = _spacing_bytes(self.parts)
        self.shape = self._shape()

    @classmethod
    def around(cls, blocks: Sequence[Any]) -> tuple[PagedKV, I64]:
        """Return dense blocks of one size anywhere in CPU memory as pages, and their numbers, (n,).

        Other numbers are memory of anybody: the caller copies only these.

        Raises:
            ValueError: the blocks overlap, or lie too far apart.
        """
        size_bytes = int(blocks[0].nbytes)
        places = np.array([_address(block) for block in blocks], np.int64)
        if len(places) > 1 and np.diff(np.sort(places)).min() < size_bytes:
            raise ValueError("blocks overlap")
        first = int(places.min())
        step_bytes = int(np.gcd.reduce(places - first)) or size_bytes
        numbers = (places - first) // step_bytes
        view = _host_view(blocks, first, (int(numbers.max()) + 1, size_bytes), (step_bytes, 1))
        return cls([view], _overlapping=True), numbers

    def _shape(self) -> Shape:
        if len(self.parts) == 1:
            return Shape.SINGLE
        return Shape.STACKED if self._spacing_bytes else Shape.RAGGED

    def host_parts(self) -> list[U8]:
        """Return a zero-copy uint8 view of each part's pages, shape (page_count, run_bytes).

        Raises:
            KVHearthError: ``bad_contract`` if the tensors are not in CPU memory.
        """
        self._require_host()
        return [
            _host_view(
                self._tensors,
                part.address,
                (self.page_count, part.run_bytes),
                (part.stride_bytes, 1),
            )
            for part in self.parts
        ]

    def host_stack(self) -> U8 | None:
        """Return a zero-copy uint8 view (parts, page_count, run_bytes); None unless stacked.

        Tensors of separate allocations that happen to lie at equal distances count too: every byte
        that the view reaches belongs to a registered tensor.

        Raises:
            KVHearthError: ``bad_contract`` if the tensors are not in CPU memory.
        """
        self._require_host()
        if self.shape is not Shape.STACKED:
            return None
        first = self.parts[0]
        shape = (len(self.parts), self.page_count, first.run_bytes)
        strides = (self._spacing_bytes, first.stride_bytes, 1)
        return _host_view(self._tensors, first.address, shape, strides)

    def host_spans(self) -> list[Span]:
        """Return the memory that holds the parts, by address; gaps of a page or less are included.

        Raises:
            KVHearthError: ``bad_contract`` if the tensors are not in CPU memory.
        """
        self._require_host()
        spans: list[Span] = []
        for part in sorted(self.parts, key=lambda part: part.address):
            size_bytes = (self.page_count - 1) * part.stride_bytes + part.run_bytes
            end = part.address + size_bytes
            last = spans[-1] if spans else None
            if last is None or part.address > last.address + last.size_bytes + mmap.PAGESIZE:
                spans.append(Span(part.address, size_bytes, mmap.PAGESIZE))
            elif end > last.address + last.size_bytes:
                spans[-1] = last._replace(size_bytes=end - last.address)
        return spans

    def _require_host(self) -> None:
        if self.device != "cpu":
            raise _bad(f"the tensors are on {self.device}: use the CUDA copier for them")


@dataclass(frozen=True)
class _Described:
    part: Part
    page_count: int
    device: str


class _Memory:
    """Lends foreign memory to numpy through the array interface and keeps its owners alive."""

    def __init__(
        self, owners: Any, address: int, shape: tuple[int, ...], strides: tuple[int, ...]
    ) -> None:
        self.owners = owners
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "data": (address, False),
            "shape": shape,
            "strides": strides,
        }


def _host_view(owners: Any, address: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> U8:
    return np.asarray(_Memory(owners, address, shape, strides))


def _bad(problem: str) -> KVHearthError:
    return KVHearthError(Reason.BAD_CONTRACT, problem)


def _same(values: list[Any], what: str) -> Any:
    for index, value in enumerate(values):
        if value != values[0]:
            raise _bad(
                f"tensor {index} has {what} {value}, tensor 0 has {values[0]}: register tensors "
                "of one KV cache group together and others apart"
            )
    return values[0]


def _address(block: Any) -> int:
    if isinstance(block, np.ndarray):
        return int(block.__array_interface__["data"][0])
    return int(block.data_ptr())


def _is_torch(tensor: Any) -> bool:
    # Duck typing instead of isinstance: users without torch must not have to import it.
    return hasattr(tensor, "data_ptr") and hasattr(tensor, "untyped_storage")


def _describe(tensor: Any, index: int, overlapping: bool) -> _Described:
    """Check one tensor and describe the location of its pages."""
    if _is_torch(tensor):
        item_bytes = int(tensor.element_size())
        strides = [int(stride) * item_bytes for stride in tensor.stride()]
        address, storage = int(tensor.data_ptr()), int(tensor.untyped_storage().data_ptr())
        device = str(tensor.device)
    elif isinstance(tensor, np.ndarray):
        if tensor.dtype.hasobject or not tensor.flags.writeable:
            raise _bad(
                f"tensor {index} is read-only or holds Python objects: register plain memory"
            )
        item_bytes = int(tensor.itemsize)
        strides = list(tensor.strides)
        address, storage = int(tensor.ctypes.data), 0
        device = "cpu"
    else:
        raise _bad(f"tensor {index} is a {type(tensor).__name__}: register torch or numpy tensors")
    if device != "cpu" and not device.startswith("cuda"):
        raise _bad(f"tensor {index} is on {device}: only CPU and CUDA memory can be copied")
    shape = [int(extent) for extent in tensor.shape]
    if len(shape) < 1 or 0 in shape:
        raise _bad(
            f"tensor {index} has shape {tuple(shape)}: dimension 0 must count pages, none empty"
        )
    run_bytes = _run_bytes(shape[1:], strides[1:], item_bytes, index)
    stride_bytes = strides[0] if shape[0] > 1 else run_bytes
    if stride_bytes < run_bytes and not (overlapping and stride_bytes > 0):
        raise _bad(
            f"tensor {index}: pages of {run_bytes} bytes begin every {stride_bytes} bytes and "
            "overlap: dimension 0 must be the page, with a page's bytes in one run"
        )
    part = Part(address, run_bytes, stride_bytes, 0, storage)
    return _Described(part, shape[0], device)


def _run_bytes(extents: list[int], strides: list[int], item_bytes: int, index: int) -> int:
    """Return the bytes of one page, whose dimensions must fill one run of memory in some order."""
    run_bytes = item_bytes
    for stride, extent in sorted(zip(strides, extents, strict=True)):
        if extent == 1:
            continue
        if stride != run_bytes:
            raise _bad(
                f"tensor {index}: the bytes of a page are not one run (a dimension of {extent} "
                f"has a stride of {stride} bytes, dense would be {run_bytes}): register the pieces "
                "that are, for example K and V apart"
            )
        run_bytes *= extent
    return run_bytes


def _append_merged(parts: list[Part], part: Part, page_count: int) -> None:
    """Append the shard's next part, merged with the last if it directly follows it in each page."""
    if not parts:
        parts.append(part)
        return
    last = parts[-1]
    run_bytes = last.run_bytes + part.run_bytes
    follows = part.address == last.address + last.run_bytes and part.storage == last.storage
    if follows and page_count == 1:
        parts[-1] = replace(last, run_bytes=run_bytes, stride_bytes=run_bytes)
    elif follows and part.stride_bytes == last.stride_bytes >= run_bytes:
        parts[-1] = replace(last, run_bytes=run_bytes)
    else:
        parts.append(replace(part, start_bytes=last.end_bytes))


def _spacing_bytes(parts: Sequence[Part]) -> int:
    """Return the equal distance between equal parts, 0 if there is none.

    The distance is often negative on the CPU: large allocations are handed out from the top down.
    """
    if len(parts) < 2 or len({(part.run_bytes, part.stride_bytes) for part in parts}) > 1:
        return 0
    steps = {right.address - left.address for left, right in itertools.pairwise(parts)}
    spacing = steps.pop()
    return 0 if steps else spacing
