"""SGLang's host pools: their pages as views, without a copy, and the prefixes that they allow."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvhearth.errors import KVHearthError, Reason
from kvhearth.model import Bools
from kvhearth.page_layout import PagedKV
from kvhearth.transfer.memory import Pages

ALL_PAGES, TRAILING_PAGES = "all_pages", "trailing_pages"


@dataclass(frozen=True, eq=False)
class HostPool:
    """A host pool's pages.

    Attributes:
        pool: SGLang's pool.
        kv: its pages, in place.
        runs: bytes of the runs of memory that make a page.
    """

    pool: Any
    kv: PagedKV
    runs: tuple[int, ...]

    def pages(self, places: Any, count: int) -> Pages | list[Any]:
        """Return the memory of ``count`` pages for ``Cache``.

        Args:
            places: index of each token in the pool; or a list of tensors, each of a page's bytes.

        Raises:
            ValueError: there are not so many.
        """
        if not isinstance(places, torch.Tensor):
            return list(places)
        size = int(self.pool.page_size)
        if places.numel() != count * size:
            raise ValueError(f"{places.numel()} host indices for {count} pages of {size} tokens")
        return Pages(self.kv, places[::size].numpy() // size)


def host_pool(name: str, pool: Any) -> HostPool:
    """Describe a pool by the addresses that it gives for its pages; copies nothing.

    Raises:
        KVHearthError: ``bad_contract`` naming the pool whose pages have no such addresses.
    """
    size = int(pool.page_size)
    count = int(pool.size) // size
    try:
        first, second, last = (
            pool.get_page_buffer_meta(torch.arange(page * size, (page + 1) * size))
            for page in (0, min(1, count - 1), count - 1)
        )
        if int(pool.logical_size) != int(pool.size):
            raise ValueError("its pages are spread over ranks")
        runs = [
            _run(pool, int(length), [int(address) for address in addresses], count)
            for length, *addresses in zip(first[1], first[0], second[0], last[0], strict=True)
        ]
    except (AssertionError, AttributeError, NotImplementedError, TypeError, ValueError) as error:
        kind = f"{type(pool).__name__} of layout {pool.layout}"
        problem = f"host pool {name!r}, a {kind}, cannot be stored: {error}"
        raise KVHearthError(Reason.BAD_CONTRACT, problem) from error
    # By address inside an allocation: runs at equal distances are copied together. Allocations keep
    # their order, for where they lie differs from process to process.
    order = list(dict.fromkeys(storage for storage, _ in runs))
    runs.sort(key=lambda run: (order.index(run[0]), run[1].data_ptr()))
    views = [view for _, view in runs]
    return HostPool(pool, PagedKV(views), tuple(int(view.shape[1]) for view in views))


def _run(pool: Any, length: int, addresses: list[int], count: int) -> tuple[int, torch.Tensor]:
    """Return one run of each page as a view (count, length), with its allocation's address.

    Args:
        addresses: of the run in the first, the second and the last page.
    """
    first, second, last = addresses
    stride = second - first or length
    if last != first + (count - 1) * stride:
        raise ValueError("its pages are not at equal distances")
    for tensor in _tensors(pool):
        storage = tensor.untyped_storage()
        if storage.data_ptr() <= first < storage.data_ptr() + storage.nbytes():
            memory = torch.empty(0, dtype=torch.uint8).set_(storage)
            start = first - storage.data_ptr()
            return storage.data_ptr(), memory.as_strided((count, length), (stride, 1), start)
    raise ValueError("its pages are not in its own memory")


def _tensors(pool: Any) -> Iterator[torch.Tensor]:
    found = [pool.kv_buffer]
    with contextlib.suppress(AttributeError):
        found.append(pool.get_hybrid_pool_buffer())
    for item in found:
        yield from item if isinstance(item, list | tuple) else [item]


def leading(flags: Bools) -> int:
    """Return the length of the run of True from the start."""
    return len(flags) if flags.all() else int(flags.argmin())


def needed(transfer: Any, pages: int) -> int:
    """Return how many pages at the end of a prefix of ``pages`` a ``PoolTransfer`` needs."""
    return pages if transfer.hit_policy == ALL_PAGES else max(len(transfer.keys or ()), 1)


def restorable(flags: Bools, policy: str, trailing: int) -> Bools:
    """Return for each length 1..n of a prefix whether a pool's pages allow it.

    Args:
        flags: (n,): True for the pages that are kept.
        policy: SGLang's ``PoolHitPolicy``.
        trailing: pages at a prefix's end that it needs, or fewer if it is shorter.

    Raises:
        ValueError: for a policy that is not known.
    """
    if policy not in (ALL_PAGES, TRAILING_PAGES):
        raise ValueError(f"pages of the policy {policy} are not kept")
    lengths = np.arange(1, len(flags) + 1)
    sums = np.concatenate(([0], np.cumsum(flags)))
    starts = np.maximum(lengths - trailing, 0)
    whole: Bools = sums[lengths] - sums[starts] == lengths - starts
    return whole
