"""Calls that name more blocks than the daemon takes at once: portions of one group, one after the
other, behind one call of the client and one lease.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from kvhearth.contract import Contract, GroupKind
from kvhearth.errors import NoReason, Reason
from kvhearth.model import EXTENT_DTYPE, Bools, Tier
from kvhearth.proto.v1 import cache_pb2 as pb
from kvhearth.results import (
    CommitGroup,
    GroupResult,
    Lease,
    LookupResult,
    blocks_back,
    usable_tokens,
)
from kvhearth.wire.handshake import Welcome
from kvhearth.wire.messages import Query, absent, parse_lookup


def ranges(counts: Mapping[int, int], most: int) -> Iterator[tuple[int, range]]:
    """Split blocks, whose number is given by group, into portions: (group, positions)."""
    for group, count in counts.items():
        for start in range(0, count, most):
            yield group, range(start, min(start + most, count))


def queries(query: Query, most: int) -> Iterator[Query]:
    """Split a query into queries of at most ``most`` keys, in order."""
    if query.key_count <= most:
        yield query
        return
    for group, keys in ranges(query.counts, most):
        yield query.portion(group, keys)


def counts(groups: Mapping[int, int], most: int) -> Iterator[Mapping[int, int]]:
    """Split numbers of blocks into those of at most ``most`` blocks together."""
    if sum(groups.values()) <= most:
        yield groups
        return
    for group, blocks in ranges(groups, most):
        yield {group: len(blocks)}


def commits(groups: Mapping[int, CommitGroup], most: int) -> Iterator[Mapping[int, CommitGroup]]:
    """Split a commit into commits of at most ``most`` blocks, in order."""
    sizes = {group: len(item.keys) for group, item in groups.items()}
    if sum(sizes.values()) <= most:
        yield groups
        return
    for group, blocks in ranges(sizes, most):
        yield {group: _commit(groups[group], blocks)}


def _commit(item: CommitGroup, blocks: range) -> CommitGroup:
    """Return some consecutive blocks of a commit's group, with the chains that they belong to."""
    part = slice(blocks.start, blocks.stop)
    chains = dict(item.chains) if item.chains else {0: item.parent}
    if blocks.start and blocks.start not in chains:
        chains[blocks.start] = item.keys[blocks.start - 1]
    return CommitGroup(
        item.keys[part],
        item.extents[part],
        None if item.checksums is None else item.checksums[part],
        chains=[(at - blocks.start, chains[at]) for at in sorted(chains) if at in blocks],
        tokens=None if item.tokens is None else item.tokens[part],
    )


def joined(groups: Iterable[int], parts: Sequence[Mapping[int, Bools]]) -> dict[int, Bools]:
    """Join the flags of portions, by group."""
    if len(parts) == 1:
        return dict(parts[0])
    nothing = np.zeros(0, np.bool_)
    return {
        group: np.concatenate([nothing, *(part[group] for part in parts if group in part)])
        for group in groups
    }


def joined_presence(
    groups: Iterable[int], parts: Sequence[Mapping[int, GroupResult]]
) -> dict[int, GroupResult]:
    """Join the presence of portions, by group."""
    if len(parts) == 1:
        return dict(parts[0])
    found = absent(dict.fromkeys(groups, ()))
    for part in parts:
        for group, more in part.items():
            pairs = zip(vars(found[group]).values(), vars(more).values(), strict=True)
            found[group] = GroupResult(*map(np.concatenate, pairs))
    return found


Ask = Callable[[pb.LookupRequest], pb.LookupResponse]
_TRIES = 4
"""Attempts to lease windows and states of a hit; each is for a shorter one."""
_SSD, _REMOTE = int(Tier.SSD), int(Tier.REMOTE)


class LongLookup:
    """A lookup of more keys than one call takes.

    Blocks of full attention are leased portion by portion until one is missing. What other groups
    have is asked for without a lease; then the blocks that the hit needs of them are leased.

    Args:
        contract: the engine's contract.
        welcome: the session's.
        query: all keys.
        request: the lookup without its keys.
        ask: makes one call.
    """

    def __init__(
        self,
        contract: Contract,
        welcome: Welcome,
        query: Query,
        request: pb.LookupRequest,
        ask: Ask,
    ) -> None:
        self._contract = contract
        self._welcome = welcome
        self._query = query
        self._request = request
        self._ask_daemon = ask
        self._specs = {group: contract.groups[group] for group in query.counts}
        self._found = {group: self._nothing(group) for group in query.counts}
        self._granted = False
        self._eta_us = 0
        self._short: Reason | NoReason = ""

    def _nothing(self, group: int) -> GroupResult:
        count, shards = self._query.counts[group], self._specs[group].shards
        present, ready, leased = np.zeros((3, count), np.bool_)
        extents = np.zeros((count, shards), EXTENT_DTYPE)
        return GroupResult(present, ready, leased, np.zeros(count, np.uint8), extents)

    def run(self) -> LookupResult:
        """Make the calls, and return the answer."""
        counts, leasing = self._query.counts, bool(self._request.lease_id)
        fulls = [group for group, spec in self._specs.items() if spec.kind is GroupKind.FULL]
        for group in fulls:
            whole = leasing
            for blocks in self._ranges(group, range(counts[group])):
                self._ask(group, blocks, leases=whole)
                leased = self._found[group].leased[blocks.start : blocks.stop]
                whole = whole and bool(leased.all())
        others = [group for group in counts if group not in fulls]
        for group in others:
            for blocks in self._ranges(group, range(counts[group])):
                self._ask(group, blocks, leases=False)
        hit = self._lease_hit(others) if leasing else self._usable(lambda one: one.ready)
        self._promote(hit)
        return self._result(hit)

    def _usable(self, flags: Callable[[GroupResult], Bools]) -> int:
        pairs = [(self._specs[group], flags(found)) for group, found in self._found.items()]
        return usable_tokens(pairs, 1 << 62)

    def _needed(self, group: int, hit: int) -> range:
        spec = self._specs[group]
        end = hit // spec.block_tokens
        return range(max(end - blocks_back(spec, end), 0), end)

    def _lease_hit(self, others: list[int]) -> int:
        """Lease what the longest hit needs of ``others``, or a shorter one's; return the hit."""
        could = {
            group: found.ready.copy() if group in others else found.leased
            for group, found in self._found.items()
        }
        pairs = [(self._specs[group], flags) for group, flags in could.items()]
        for _ in range(_TRIES):
            hit = usable_tokens(pairs, 1 << 62)
            short = False
            for group in others:
                blocks = self._needed(group, hit)
                for some in self._ranges(group, blocks):
                    self._ask(group, some, leases=True)
                part = slice(blocks.start, blocks.stop)
                could[group][part] = self._found[group].leased[part]
                short = short or not could[group][part].all()
            if not short:
                return hit
        return self._usable(lambda one: one.leased)

    def _promote(self, hit: int) -> None:
        """Ask for the blocks on slower tiers that a longer hit needs."""
        reach = self._usable(lambda one: one.ready | (one.tiers >= _SSD))
        if reach <= hit:
            return
        leases, prefetch = bool(self._request.lease_id), self._request.prefetch
        for group, spec in self._specs.items():
            blocks = self._needed(group, reach)
            if spec.kind is GroupKind.FULL:
                blocks = range(hit // spec.block_tokens, blocks.stop)
            for some in self._ranges(group, blocks):
                if (self._found[group].tiers[some.start : some.stop] >= _SSD).any():
                    self._ask(group, some, leases=leases, prefetch=prefetch, useful=True)

    def _ranges(self, group: int, blocks: range) -> Iterator[range]:
        for _, some in ranges({group: len(blocks)}, self._welcome.keys_max):
            yield blocks[some.start : some.stop]

    def _ask(
        self,
        group: int,
        blocks: range,
        *,
        leases: bool,
        prefetch: bool = False,
        useful: bool = False,
    ) -> None:
        """Look up some blocks of a group, and note what is there.

        Args:
            leases: lease the blocks that are there up to the first that is not.
            prefetch: promote blocks on slower tiers.
            useful: such blocks would make the hit longer.
        """
        query, request = self._query.portion(group, blocks), pb.LookupRequest()
        request.CopyFrom(self._request)
        request.portion, request.prefetch = True, prefetch
        request.joins = leases and self._granted
        if not leases and not prefetch:
            request.lease_id = 0
        query.put_into(request.groups)
        reply = self._ask_daemon(request)
        answer = parse_lookup(self._contract, self._welcome, query, request.lease_id, reply)
        found = answer.groups[group]
        self._granted = self._granted or bool(reply.lease_id)
        self._short = self._short or answer.lease_short
        if useful or ((found.tiers == _REMOTE) & ~found.present).any():
            self._eta_us = max(self._eta_us, answer.eta_us)
        self._note(self._found[group], slice(blocks.start, blocks.stop), found)

    @staticmethod
    def _note(whole: GroupResult, part: slice, found: GroupResult) -> None:
        for name in ("present", "ready", "tiers"):
            getattr(whole, name)[part] = getattr(found, name)
        records, leased = whole.extents[part], found.leased
        records[leased] = found.extents.reshape(-1, records.shape[1])
        whole.leased[part] |= leased

    def _result(self, hit: int) -> LookupResult:
        groups = {
            group: replace(found, extents=found.extents[found.leased].reshape(-1))
            for group, found in self._found.items()
        }
        boot_id, lease_id = self._welcome.boot_id, self._request.lease_id
        slots = {group: each.extents["slot"] for group, each in groups.items()}
        lease = Lease(lease_id, boot_id, slots) if self._granted else None
        return LookupResult(hit, lease, groups, self._eta_us, "", self._short, boot_id, lease_id)
