"""Answers lookups from the mapped index, without a call to the daemon.

A found block is held once the daemon has heard of its lease; its generation before and after the
copy decides whether it was read, as for every load. A question that the index cannot answer goes to
the daemon.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from kvhearth.clock import Clock
from kvhearth.contract import Contract, GroupKind, GroupSpec
from kvhearth.model import EXTENT_DTYPE, Records, Tier
from kvhearth.native.table import Found, Table
from kvhearth.proto.v1 import cache_pb2 as pb
from kvhearth.results import Grant, GroupResult, Lease, LookupResult, blocks_back
from kvhearth.session.link import Link
from kvhearth.wire.handshake import Welcome
from kvhearth.wire.messages import Query, whole_group

# Each access to an enumeration member by name costs a search.
_FULL = GroupKind.FULL
_AGE_US_MAX = (1 << 32) - 1
_ASKS_S = 1.0


class _Answer(NamedTuple):
    """Hit in tokens, and the presence of all keys by group."""

    hit_tokens: int
    groups: dict[int, GroupResult]


def find_mapped(
    link: Link, contract: Contract, query: Query, epoch: int, lease_id: int
) -> LookupResult | None:
    """Return the answer to a lookup; None if the daemon must be asked.

    Full hits are always answered. Where no tier lies below memory and the table is whole, partial
    hits and misses of contracts with one group of full attention are too.

    Args:
        link: with a table, if the daemon shares its index.
        lease_id: id of the lease that the caller requests for a hit; 0 for none.
    """
    # A dead daemon's index would be served for ever.
    if not link.tables or not link.session.alive():
        return None
    welcome = link.session.welcome
    answer = _answer(link.tables[0], contract, welcome, query, epoch)
    if answer is None:
        return None
    hit, groups = answer
    lease = None
    if not lease_id:
        groups = {group: _without_lease(found) for group, found in groups.items()}
    elif hit:
        slots = {group: found.extents["slot"] for group, found in groups.items()}
        lease = Lease(lease_id, welcome.boot_id, slots, Grant(heard=False))
    return LookupResult(hit, lease, groups, 0, "", "", welcome.boot_id, lease_id)


@dataclass(slots=True)
class _Unheard:
    """A lease of which the daemon has not told what it leased.

    Attributes:
        id, grant: the lease's; the lease itself would keep the extents.
        size: bytes that it takes.
        posts: those without an answer.
        told: a post of it may have been sent.
    """

    id: int
    grant: Grant
    size: int = 0
    posts: int = 1
    told: bool = False


@dataclass(slots=True)
class Post:
    """A lookup by which the daemon hears of keys that were found without it.

    Attributes:
        query: the keys.
        epoch: of the question.
        asked_at: monotonic time of the question.
        leases: knows ``lease``.
        lease: the lease that it asks for, if any.
        tokens: those that it leases if all is as the index said.
        portion, joins: as in ``LookupRequest``.
    """

    query: Query
    epoch: int
    asked_at: float
    leases: MappedLeases
    lease: _Unheard | None
    tokens: int
    portion: bool = False
    joins: bool = False

    def request(self) -> pb.LookupRequest:
        """Make the message; nobody who waits for an answer calls this."""
        # Nothing would release a miss's lease, and it may be a hit when the daemon hears of it.
        lease_id = 0 if self.lease is None else self.leases.tell(self.lease)
        request = pb.LookupRequest(
            epoch=self.epoch,
            lease_id=lease_id,
            released=self.lease is not None and not lease_id,
            portion=self.portion,
            joins=self.joins,
        )
        # The daemon must not take it for a lookup that came after the stores that follow it.
        request.age_us = min(round((self.leases.clock.now() - self.asked_at) * 1e6), _AGE_US_MAX)
        self.query.put_into(request.groups)
        return request

    def answered(self, reply: pb.LookupResponse | None) -> None:
        """Take the answer; None if none comes."""
        if self.lease is not None:
            short = reply is None or not reply.lease_id or reply.hit_tokens < self.tokens
            self.leases.answered(self.lease, short=short)


def _portions(query: Query, found: LookupResult, most: int) -> Iterator[tuple[Query, bool]]:
    """Split a query into portions that are leased, and those that are not."""
    for group, count in query.counts.items():
        rows = np.flatnonzero(found.groups[group].leased)
        begin, end = (int(rows[0]), int(rows[-1]) + 1) if len(rows) else (0, 0)
        for first, last in ((0, begin), (begin, end), (end, count)):
            for start in range(first, last, most):
                leased = found.lease is not None and first == begin and last == end
                yield query.portion(group, range(start, min(start + most, last))), leased


class MappedLeases:
    """Leases of answers from the mapped index, until the daemon has told what it leased. The daemon
    leases a bounded part of its memory, and evicts what it did not lease. Thread-safe.
    """

    def __init__(self, contract: Contract, clock: Clock) -> None:
        self.clock = clock
        self._contract = contract
        self._changed = threading.Condition()
        self._link: Link | None = None
        self._slot_bytes = list[int]()
        """By group, for the link."""
        self._unheard: dict[int, _Unheard] = {}
        """By id of the lease."""
        self._unheard_bytes = 0
        self._asks_until = 0.0
        """Monotonic time until which the daemon is asked, since it leased less than was told."""

    def posts(self, link: Link, query: Query, found: LookupResult, epoch: int) -> list[Post] | None:
        """Return the posts by which the daemon hears of an answer; None if it has to be asked."""
        lease = None
        if found.lease is not None:
            lease = _Unheard(found.lease.id, found.lease.grant)
            if not self._enter(link, found, lease):
                return None
        most, now = link.session.welcome.keys_max, self.clock.now()
        if query.key_count <= most:
            return [Post(query, epoch, now, self, lease, found.hit_tokens)]
        posts = list[Post]()
        for part, leased in _portions(query, found, most):
            groups = self._contract.groups
            tokens = sum(n * groups[group].block_tokens for group, n in part.counts.items())
            posts.append(Post(part, epoch, now, self, lease if leased else None, tokens, True))
        leased_posts = [post for post in posts if post.lease is not None]
        for post in leased_posts[1:]:
            post.joins = True
        if lease is not None:
            lease.posts = len(leased_posts)
        return posts

    def _enter(self, link: Link, found: LookupResult, lease: _Unheard) -> bool:
        """Enter the lease of an answer; False if the daemon may have too little room for it. Others
        may post, too: half of the room counts.
        """
        with self._changed:
            table = link.tables[0]
            if self._link is not link:
                self._link, self._unheard_bytes = link, 0
                self._unheard.clear()
                groups = self._contract.groups
                self._slot_bytes = [table.slot_bytes(group.page_bytes) for group in groups]
            for group, one in found.groups.items():
                lease.size += len(one.extents) * self._slot_bytes[group]
            if lease.size + self._unheard_bytes > table.room_bytes // 2:
                return False
            if self.clock.now() < self._asks_until:
                return False
            self._unheard[lease.id] = lease
            self._unheard_bytes += lease.size
        return True

    def tell(self, lease: _Unheard) -> int:
        """Return the id to lease with; 0 if the lease has been released."""
        with self._changed:
            if self._unheard.get(lease.id) is not lease:
                return 0
            lease.told = True
            return lease.id

    def forget(self, lease_id: int) -> bool:
        """Forget a released lease; False if the daemon may have heard of it, and has to release
        it.
        """
        with self._changed:
            lease = self._unheard.get(lease_id)
            # The daemon counts hits of a request in portions by what it leases.
            if lease is None or lease.told or lease.posts > 1:
                return False
            self._remove(lease)
            return True

    def answered(self, lease: _Unheard, *, short: bool) -> None:
        """Take the answer to one of the posts of a lease."""
        with self._changed:
            if self._unheard.get(lease.id) is not lease:
                return  # released, or of another session
            if short:
                lease.grant.short = True
                self._asks_until = self.clock.now() + _ASKS_S
            lease.posts -= 1
            if not lease.posts:
                self._remove(lease)
                lease.grant.heard = True

    def _remove(self, lease: _Unheard) -> None:
        del self._unheard[lease.id]
        self._unheard_bytes -= lease.size
        self._changed.notify_all()

    def wait(self, link: Link, query: Query, seconds: float) -> None:
        """Wait until the daemon has heard of the other leases, if a call would take their room."""
        if not self._unheard:
            return
        table, specs = link.tables[0], self._contract.groups
        size = sum(
            count * specs[group].shards * table.slot_bytes(specs[group].page_bytes)
            for group, count in query.counts.items()
        )
        with self._changed:
            self.clock.wait_for(
                self._changed,
                lambda: size + self._unheard_bytes <= table.room_bytes or not self._unheard,
                seconds,
            )

    def holds(self, found: LookupResult) -> bool:
        """Whether the daemon leases what an answer names, or may still do so: until it has told
        that, all blocks must be where they were.
        """
        lease, link = found.lease, self._link
        if lease is None or lease.grant.heard or lease.grant.short:
            return lease is None or not lease.grant.short
        return link is not None and all(
            link.tables[0].intact(one.extents) for one in found.groups.values()
        )


def _without_lease(found: GroupResult) -> GroupResult:
    nothing = np.empty(0, EXTENT_DTYPE)
    return replace(found, leased=np.zeros_like(found.leased), extents=nothing)


def _answer(
    table: Table, contract: Contract, welcome: Welcome, query: Query, epoch: int
) -> _Answer | None:
    space = table.space(welcome.namespace_number, epoch)
    if not space:
        return None
    (first, *others) = query.blobs
    complete = welcome.memory_only and not table.unplaced_count
    if complete and not others and contract.groups[first].kind is _FULL:
        return _prefix(table, contract, query, first, space)
    seen = {}
    for group, count in query.counts.items():
        found = _find(table, contract, query, group, space, every=False)
        if found.hits < count:
            return None
        seen[group] = _records(found).reshape(count, contract.groups[group].shards)
    specs = [contract.groups[group] for group in seen]
    step = math.lcm(*(spec.block_tokens for spec in specs))
    ends = [
        len(found) * spec.block_tokens for spec, found in zip(specs, seen.values(), strict=True)
    ]
    hit = min(ends) // step * step
    return _Answer(
        hit,
        {group: _needed(contract.groups[group], hit, found) for group, found in seen.items()},
    )


def _find(
    table: Table, contract: Contract, query: Query, group: int, space: int, *, every: bool
) -> Found:
    spec, blob = contract.groups[group], query.blobs[group]
    return table.find(
        space + group, blob, contract.hash_bytes, spec.page_bytes, spec.shards, every=every
    )


def _records(found: Found) -> Records:
    """Return the extents as an array that is the caller's own."""
    return np.frombuffer(bytearray(found.extents[:-1]), EXTENT_DTYPE)


def _prefix(
    table: Table, contract: Contract, query: Query, group: int, space: int
) -> _Answer | None:
    """Answer for one group of which a hit needs all blocks from the start."""
    count, spec = query.counts[group], contract.groups[group]
    found = _find(table, contract, query, group, space, every=True)
    if found.hits == count:
        whole = whole_group(count, _records(found))
        return _Answer(count * spec.block_tokens, {group: whole})
    if found.doubtful or found.mask is None:
        return None
    run = found.mask.index(0)
    present = np.frombuffer(bytearray(found.mask[:count]), np.bool_)
    leased = np.arange(count) < run
    tiers = np.where(present, np.uint8(Tier.DRAM), np.uint8(Tier.NOWHERE))
    extents = _records(found)[: run * spec.shards]
    result = GroupResult(present, present.copy(), leased, tiers, extents)
    return _Answer(run * spec.block_tokens, {group: result})


def _needed(spec: GroupSpec, hit_tokens: int, found: Records) -> GroupResult:
    """Return the presence of a group whose blocks are all here, with those that a hit loads."""
    count, end = len(found), hit_tokens // spec.block_tokens
    first = max(end - blocks_back(spec, end), 0)
    whole = whole_group(count, found[first:end].reshape(-1))
    if (first, end) == (0, count):
        return whole
    whole.leased[:first] = whole.leased[end:] = False
    return whole
