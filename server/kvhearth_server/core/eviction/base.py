"""Interface of an eviction policy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from kvhearth_server.core.eviction.ring import I64, U32


def nothing_passed() -> None:
    """Lets a policy pass over any number of used blocks."""


class EvictionPolicy(Protocol):
    """Orders the heads of blocks of one namespace and one size class, by slot number.

    The caller guarantees that all calls come from one thread, that all policies over one
    ``PolicyArrays`` share an arena, and that a chain's blocks are inserted leaf first, so that its
    tail goes before its prefix. The policy frees nothing: it proposes, the caller evicts.

    Slots are I64 arrays of shape (n,); the caller guarantees to ``touch`` and ``evict`` that they
    exist. Methods that raise ValueError have changed nothing.
    """

    def insert(self, slots: I64, fingerprints: U32 | None = None) -> None:
        """Admit blocks, the coldest first; O(n), vectorised.

        ``fingerprints``, shape (n,), are hashes of the blocks' keys, uniform over 32 bits. A policy
        may use them to recognise a key that was here before. Without them (adoption) every block
        counts as new.

        Raises:
            ValueError: if a slot is in a policy already, occurs twice or does not exist, or the
                shapes differ.
        """
        ...

    def insert_one(self, slot: int, fingerprint: int) -> None:
        """Admit one block with the hash of its key.

        Raises:
            ValueError: as ``insert``.
        """
        ...

    def touch(self, slots: I64) -> None:
        """Count a use of slots, of other policies too: the same as ``PolicyArrays.touch``."""
        ...

    def remove(self, slots: I64) -> None:
        """Remove members whose blocks were deleted, replaced or found invalid; O(n), vectorised.

        Raises:
            ValueError: if a slot is not a member or occurs twice.
        """
        ...

    def evict(self, slot: int) -> None:
        """Evict one member: the last victim or another block of its chain.

        Raises:
            ValueError: if the slot is not a member.
        """
        ...

    def victim(
        self, evictable: Callable[[int], bool], passed: Callable[[], None] = nothing_passed
    ) -> int | None:
        """Return the member to evict next, still a member; None if none of them is evictable.

        ``passed`` is called for each used block that was passed over. If it or ``evictable``
        raises, the policy stays consistent and the next call continues from there.

        ``evictable`` must be pure during the call. Without other calls between, and while
        ``evictable`` answers the same, a second call returns the same slot.

        Passing over a used block spends one of its uses, so those steps are paid for by ``touch``.
        Passing over one that is not evictable puts it where the next scan meets it last. Therefore
        only a policy whose members are nearly all leased makes a call O(n). The global cap on held
        bytes rules that out except for small namespaces, and a call never looks at a member more
        than ``FREQ_MAX + 3`` times.
        """
        ...

    def age_rank(self) -> int | None:
        """Push time of the entry at the cold end; None if there is none.

        The unit is pushes to all policies of these arrays. The caller takes from the policy with
        the smaller rank. Approximate: never early, late by some tens of entries of this policy (one
        tick serves a group), so a tiny active namespace looks younger than it is, not older.
        """
        ...

    def slots(self) -> I64:
        """All members, in no guaranteed order; shape (len,)."""
        ...

    def check(self) -> None:
        """Recompute everything from scratch.

        Raises:
            ValueError: with the numbers, if entries, positions and counts disagree.
        """
        ...

    def __len__(self) -> int:
        """Number of members."""
        ...
