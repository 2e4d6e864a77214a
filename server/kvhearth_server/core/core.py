"""Facade of the core: requests and ``now`` go in, replies and actions come out.

The core is one state and the parts that change it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np

from kvhearth.errors import Reason
from kvhearth.model import I64, U32
from kvhearth_server.core.check_books import Holders, book_portions, check_books
from kvhearth_server.core.evictor import Evictor
from kvhearth_server.core.following import Following
from kvhearth_server.core.lookup import Reading
from kvhearth_server.core.membership import Membership
from kvhearth_server.core.namespaces import Namespace
from kvhearth_server.core.pins import Pinning
from kvhearth_server.core.promotion import Promotions
from kvhearth_server.core.publishing import Publishing
from kvhearth_server.core.removal import Cause
from kvhearth_server.core.reservations import Writing
from kvhearth_server.core.short_keys import ShortKeys
from kvhearth_server.core.slot_table import Geometry, SlabPool
from kvhearth_server.core.state import CoreState, Limits, require
from kvhearth_server.core.writeback import Writeback


class Core:
    """Makes all decisions and performs no actions."""

    def __init__(
        self,
        geometry: Geometry,
        limits: Limits,
        generation: U32 | None = None,
        *,
        hash_seed: int = 0,
        slab_nodes: I64 | None = None,
    ) -> None:
        """Make a core; ``slab_nodes`` is the NUMA node of each slab, by default one for all."""
        slots = np.zeros(geometry.slot_count, np.uint32) if generation is None else generation
        self.state = CoreState(geometry, limits, slots, hash_seed, slab_nodes)
        self.evictor = Evictor(self.state)
        self.membership = Membership(self.state)
        self.writing = Writing(self.state, self.evictor)
        self.reading = Reading(self.state)
        self.following = Following(self.state)
        self.short_keys = ShortKeys(self.state, self.following)
        self.pinning = Pinning(self.state)
        self.writeback = Writeback(self.state)
        self.publishing = Publishing(self.state)
        self.promotions = Promotions(self.state, self.evictor)

    def bump_epoch(
        self,
        session: int,
        expected: int,
        *,
        only_alone: bool = False,
        label: str | None = None,
        relabel: bool = False,
    ) -> int:
        """Invalidate all older blocks of the session's namespace; returns the new epoch.

        Takes no longer for a namespace that holds more, but for its pins, which end: old blocks are
        never found again and leave by eviction.

        Args:
            session: selects the namespace.
            expected: the epoch that the caller assumes.
            only_alone: refuse if another group lives in the namespace.
            label: name of the new weights at shared tiers; None keeps the namespace off these.
            relabel: only set the label, and keep the epoch, of which it must be the first label.

        Raises:
            KVHearthError: ``group_gone``, ``stale_epoch``, ``namespace_shared``.
        """
        namespace = self.state.namespaces.get(self.state.group_of(session).namespace)
        require(
            namespace.groups == 1 or not only_alone,
            Reason.NAMESPACE_SHARED,
            lambda: f"{namespace.groups - 1} other engines use the namespace",
        )
        if relabel:
            return self.state.namespaces.relabel(namespace, expected, label)
        return self.state.namespaces.bump(namespace, expected, label)

    def bump_namespace(
        self, digest: bytes, expected: int | None = None, label: str | None = None
    ) -> int:
        """Bump the epoch of a namespace named by an operator; returns the new epoch.

        Args:
            expected: refuse unless this is the current epoch; None bumps any epoch.
            label: as for ``bump_epoch``.

        Raises:
            KVHearthError: ``unknown_namespace``, ``stale_epoch``.
        """
        namespace = self.named(digest)
        current = namespace.epoch if expected is None else expected
        return self.state.namespaces.bump(namespace, current, label)

    def evict(self, digest: bytes, keep_bytes: int, blocks_max: int | None = None) -> int:
        """Evict blocks of a namespace, coldest first, until it uses at most ``keep_bytes``.

        Returns the number of evicted blocks.

        Args:
            blocks_max: bound on the blocks removed in this call; each costs some microseconds.

        Raises:
            KVHearthError: ``unknown_namespace``.
        """
        return self.evictor.shrink(self.named(digest), keep_bytes, Cause.ASKED, blocks_max)

    def drop_copies(self, digest: bytes) -> None:
        """Make all copies of a namespace on slower tiers unfindable, for good.

        Blocks in memory still count as saved until they are passed to ``Writeback.lost``.

        Raises:
            KVHearthError: ``unknown_namespace``.
        """
        self.state.namespaces.drop_copies(self.named(digest))

    def withhold(self, slabs: Iterable[int]) -> None:
        """Give out no more slots of some slabs, whose memory cannot be had (yet)."""
        self._usable(slabs, -1, SlabPool.withhold)

    def offer(self, slabs: Iterable[int]) -> None:
        """Give out slots of empty slabs that were withheld."""
        self._usable(slabs, 1, SlabPool.offer)

    def _usable(
        self, slabs: Iterable[int], sign: int, change: Callable[[SlabPool, list[int]], int]
    ) -> None:
        own = list(slabs)
        for segment, pool in enumerate(self.state.pools):
            inside = [slab for slab in own if pool.first_slab <= slab < pool.end_slab]
            self.state.books[segment].capacity += sign * change(pool, inside)

    def named_by(self, digits: str) -> Namespace:
        """The only namespace whose digest begins with these hex digits.

        Raises:
            KVHearthError: ``unknown_namespace`` for none or several.
        """
        found = [each for each in self.state.namespaces if each.digest.hex().startswith(digits)]
        require(
            len(found) == 1,
            Reason.UNKNOWN_NAMESPACE,
            f"{len(found)} namespaces start with {digits}; /v1/namespaces lists them",
        )
        return found[0]

    def named(self, digest: bytes) -> Namespace:
        """The namespace of a digest.

        Raises:
            KVHearthError: ``unknown_namespace``.
        """
        namespace = self.state.namespaces.find(digest)
        require(namespace, Reason.UNKNOWN_NAMESPACE, f"no namespace {digest.hex()}")
        assert namespace is not None
        return namespace

    def check_books(self) -> None:
        """Recount everything; see ``check_books.check_books``."""
        check_books(self.state, self._holders)

    def book_portions(self) -> Iterator[None]:
        """Recount in portions between which other calls may come; see ``check_books``."""
        return book_portions(self.state, self._holders)

    @property
    def _holders(self) -> Holders:
        return Holders(self.pinning, self.writeback, self.publishing, self.promotions)
