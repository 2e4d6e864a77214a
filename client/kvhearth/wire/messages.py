"""Converts between client values and protobuf messages. Pure; raises on malformed input."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from kvhearth.contract import TOKEN_BYTES, Contract
from kvhearth.errors import KVHearthError, NoReason, Reason, reason_of
from kvhearth.model import (
    CHECKSUM_BYTES,
    EXTENT_BYTES,
    EXTENT_DTYPE,
    EXTENT_RECORD,
    TOKENS_UNKNOWN,
    TOKENS_UNPUBLISHED,
    U8,
    Bools,
    Records,
    Tier,
    split_keys,
    unpack_bits,
)
from kvhearth.proto.v1 import cache_pb2 as pb
from kvhearth.proto.v1 import types_pb2
from kvhearth.results import (
    BlockEvent,
    BlockTokens,
    CommitGroup,
    EventsResult,
    GroupResult,
    Lease,
    LookupResult,
)
from kvhearth.wire.handshake import Welcome

_TIER_NUMBERS = frozenset(map(int, Tier))
_FEW = 4
"""Number of extents up to which a Python loop is faster than numpy."""


def parse_extents(
    contract: Contract, welcome: Welcome, group: int, data: bytes, count: int
) -> Records:
    """Parse ``count`` extents, each inside its segment and of the group's page length.

    Raises:
        KVHearthError: ``bad_message``.
    """
    if len(data) != count * EXTENT_BYTES:
        raise bad_reply(f"group {group}: {len(data)} bytes are not {count} extents")
    # A copy, so that the caller may write to it; copying the bytes is faster than copying records.
    extents = np.frombuffer(bytearray(data), EXTENT_DTYPE)
    page_bytes = contract.groups[group].page_bytes
    # Readers and writers access memory by these numbers.
    if count <= _FEW:
        right, inside = _count_few(welcome, page_bytes, data)
    elif _all_good(welcome, page_bytes, extents):
        return extents
    else:
        right, inside = _count_many(welcome, page_bytes, extents)
    if right != count:
        raise bad_reply(f"group {group}: an extent is not of the contract's page length")
    if welcome.segments and inside != count:
        raise bad_reply(f"group {group}: an extent lies outside the arena")
    return extents


def _all_good(welcome: Welcome, page_bytes: int, extents: Records) -> bool:
    """Return whether all extents are right and inside one segment; False proves nothing.

    Costs a quarter of ``_count_many``: bytes are compared where they must be the same in each
    extent, and only the largest of the other numbers is checked.
    """
    count = len(extents)
    if extents["length"].tobytes() != page_bytes.to_bytes(4, "little") * count:
        return False
    if not welcome.segments:
        return True
    segments = extents["segment"].tobytes()
    room_bytes = welcome.rooms.get(int.from_bytes(segments[:2], "little"))
    if room_bytes is None or segments != segments[:2] * count:
        return False
    slots, offsets = extents["slot"], extents["offset"]
    if slots.item(slots.argmax()) >= welcome.generation_count:
        return False
    return bool(offsets.item(offsets.argmax()) + page_bytes <= room_bytes)


def _count_few(welcome: Welcome, page_bytes: int, data: bytes) -> tuple[int, int]:
    """Count like ``_count_many``, faster for few extents because numpy's calls cost more."""
    rooms = welcome.rooms
    right = inside = 0
    for slot, segment, _, offset, length, _, _ in EXTENT_RECORD.iter_unpack(data):
        right += length == page_bytes
        within = offset + page_bytes <= rooms.get(segment, 0)
        inside += within and slot < welcome.generation_count
    return right, inside


def _count_many(welcome: Welcome, page_bytes: int, extents: Records) -> tuple[int, int]:
    """Count the extents of a page's length, and those that lie inside the arena if they have it."""
    right = int(np.count_nonzero(extents["length"] == page_bytes))
    known = extents["slot"] < welcome.generation_count
    inside = 0
    for info in welcome.segments:
        last = info.bytes - page_bytes
        if last >= 0:
            within = extents["offset"] <= np.uint64(last)
            within &= extents["segment"] == info.segment
            within &= known
            inside += int(np.count_nonzero(within))
    return right, inside


def bad_reply(problem: str) -> KVHearthError:
    """Return the error for a reply that cannot be valid."""
    return KVHearthError(Reason.BAD_MESSAGE, f"the daemon's reply makes no sense: {problem}")


KeysByGroup = Mapping[int, Sequence[bytes]]
_TIERS = bytes(Tier)
_DRAM = bytes([Tier.DRAM])
_SLOT, _GENERATION = slice(0, 4), slice(20, 24)
"""Position of the two fields in an extent's bytes."""


class _OfGroup(Protocol):
    @property
    def group(self) -> int: ...


OfGroupT = TypeVar("OfGroupT", bound=_OfGroup)


class Query(NamedTuple):
    """Keys as they travel.

    Attributes:
        blobs: the keys, by group.
        counts: their number, by group.
        key_count: their number.
    """

    blobs: dict[int, bytes]
    counts: dict[int, int]
    key_count: int

    def portion(self, group: int, keys: range) -> Query:
        """Return some keys of one group."""
        count, blob = self.counts[group], self.blobs[group]
        size = len(blob) // count
        blob = blob[keys.start * size : keys.stop * size]
        return Query({group: blob}, {group: len(keys)}, len(keys))

    def put_into(self, groups: Any) -> None:
        """Append to ``groups``, a request's ``repeated GroupKeys``.

        Messages that are created in place need not be copied.
        """
        for group, blob in self.blobs.items():
            groups.add(group=group, keys=blob)


def snapshot_keys(groups: KeysByGroup) -> dict[int, tuple[bytes, ...]]:
    """Return a copy of a caller's keys, which are read once."""
    return {operator.index(group): tuple(keys) for group, keys in groups.items()}


def own_counts(groups: Mapping[int, int]) -> dict[int, int]:
    """Return a caller's counts as plain integers."""
    return {operator.index(group): operator.index(count) for group, count in groups.items()}


def own_extents(groups: Mapping[int, Records]) -> dict[int, Records]:
    """Return a caller's extents as arrays."""
    return {group: np.asarray(extents) for group, extents in groups.items()}


def own_commits(groups: Mapping[int, CommitGroup]) -> dict[int, CommitGroup]:
    """Return a copy of a caller's commit, whose keys are read once."""
    return {
        operator.index(group): CommitGroup(
            tuple(item.keys),
            np.asarray(item.extents),
            item.checksums,
            bytes(item.parent),
            tuple(item.chains),
            item.tokens,
        )
        for group, item in groups.items()
    }


def pack_query(contract: Contract, groups: KeysByGroup) -> Query:
    """Pack the keys of a caller.

    Raises:
        KVHearthError: ``bad_group`` or ``bad_keys``.
    """
    blobs = {group: _pack_keys(contract, group, keys) for group, keys in groups.items()}
    counts = {group: len(keys) for group, keys in groups.items()}
    return Query(blobs, counts, sum(counts.values()))


def parse_presence(
    contract: Contract, welcome: Welcome, query: Query, replies: Collection[pb.GroupPresence]
) -> dict[int, GroupResult]:
    """Return presence as arrays over the requested keys.

    Raises:
        KVHearthError: ``bad_message`` if the reply does not fit the request or leaves the arena.
    """
    by_group = _each_once(replies, query.counts)
    results = {}
    for group, count in query.counts.items():
        reply = by_group[group]
        whole = _whole(contract, welcome, reply, group, count)
        if whole is not None:
            results[group] = whole
            continue
        bitmaps = (reply.present, reply.ready, reply.leased or bytes(len(reply.ready)))
        present, ready, leased = _bitmaps(bitmaps, count)
        extent_count = int(np.count_nonzero(leased)) * contract.groups[group].shards
        extents = parse_extents(contract, welcome, group, reply.extents, extent_count)
        results[group] = GroupResult(
            present=present,
            ready=ready,
            leased=leased,
            tiers=_tiers(reply.tiers, count),
            extents=extents,
        )
    return results


def parse_lookup(
    contract: Contract, welcome: Welcome, query: Query, lease_id: int, reply: pb.LookupResponse
) -> LookupResult:
    """Return the answer to a lookup that requested ``lease_id``, or none with 0.

    Raises:
        KVHearthError: ``bad_message`` if the reply does not fit the request or leaves the arena.
    """
    if reply.lease_id not in (0, lease_id):
        raise bad_reply("it has another lease's id")
    found = parse_presence(contract, welcome, query, reply.groups)
    slots = {group: item.extents["slot"] for group, item in found.items() if item.extents.size}
    lease = Lease(lease_id, welcome.boot_id, slots) if slots and reply.lease_id else None
    short: Reason | NoReason = reason_of(reply.lease_short) if reply.lease_short else ""
    # Positional arguments cost half as much as keywords.
    return LookupResult(
        reply.hit_tokens, lease, found, reply.eta_us, "", short, welcome.boot_id, lease_id
    )


def _whole(
    contract: Contract, welcome: Welcome, reply: pb.GroupPresence, group: int, count: int
) -> GroupResult | None:
    """Fast path of ``parse_presence`` for a group whose keys are all ready and leased.

    None if any key is not, or if there are no keys.
    """
    bits, in_dram, _, _ = _of_whole(count)
    if not count or reply.present != bits or reply.tiers != in_dram:
        return None
    if reply.ready != bits or reply.leased != bits:
        return None
    extent_count = count * contract.groups[group].shards
    extents = parse_extents(contract, welcome, group, reply.extents, extent_count)
    return whole_group(count, extents)


def whole_group(count: int, extents: Records) -> GroupResult:
    """Return the presence of blocks that are all in DRAM and leased."""
    _, _, yes, tiers = _of_whole(count)
    return GroupResult(yes.copy(), yes.copy(), yes.copy(), tiers.copy(), extents)


@lru_cache(maxsize=64)
def _of_whole(count: int) -> tuple[bytes, bytes, Bools, U8]:
    """Return bitmap and tiers of ``count`` keys that are all ready, as in a reply and as arrays."""
    bits = ((1 << count) - 1).to_bytes((count + 7) // 8, "little")
    return bits, _DRAM * count, np.ones(count, np.bool_), np.full(count, Tier.DRAM, np.uint8)


def absent(groups: KeysByGroup) -> dict[int, GroupResult]:
    """Return the presence of a miss."""
    return {group: _absent_group(len(keys)) for group, keys in groups.items()}


def parse_events(contract: Contract, reply: pb.EventsResponse) -> EventsResult:
    """Return the events of an answer.

    Raises:
        KVHearthError: ``bad_message``, ``bad_keys``.
    """
    events = []
    for each in reply.events:
        if each.group >= len(contract.groups) or each.tier not in _TIER_NUMBERS:
            raise bad_reply("an event of no known group or tier")
        keys = split_keys(each.keys, contract.hash_bytes)
        events.append(BlockEvent(each.kind, each.group, keys, Tier(each.tier), each.cause))
    tokens = {name: held for each in reply.tokens for name, held in _parse_tokens(contract, each)}
    return EventsResult(events, reply.next, reply.lost, reply.listing, tokens=tokens)


def _parse_tokens(
    contract: Contract, told: pb.BlockTokens
) -> Iterator[tuple[tuple[int, bytes], BlockTokens | None]]:
    """Yield what blocks hold, by group and key."""
    if told.group >= len(contract.groups):
        raise bad_reply("tokens of no known group")
    keys = split_keys(told.keys, contract.hash_bytes)
    parents = split_keys(told.parents, contract.hash_bytes)
    count = contract.groups[told.group].block_tokens
    if len(parents) != len(keys) or len(told.tokens) != len(keys) * count * TOKEN_BYTES:
        raise bad_reply(f"{len(told.tokens)} bytes of tokens for {len(keys)} keys")
    none, rows = bytes(contract.hash_bytes), np.frombuffer(told.tokens, "<u4").reshape(-1, count)
    for key, parent, row in zip(keys, parents, rows.tolist(), strict=True):
        if row[0] == TOKENS_UNPUBLISHED:
            yield (told.group, key), None
            continue
        tokens = () if row[0] == TOKENS_UNKNOWN else tuple(row)
        yield (told.group, key), BlockTokens(b"" if parent == none else parent, tokens)


def parse_bitmaps(
    counts: Mapping[int, int], replies: Collection[types_pb2.GroupBitmap]
) -> dict[int, Bools]:
    """Return bitmaps as arrays over the requested keys, whose number is given by group.

    Raises:
        KVHearthError: ``bad_message`` if the reply does not fit the request.
    """
    if len(counts) == len(replies) == 1:
        for (group, count), reply in zip(counts.items(), replies, strict=True):
            if reply.group == group:
                return {group: _bits(reply.bits, count)}
    by_group = _each_once(replies, counts)
    return {group: _bits(by_group[group].bits, count) for group, count in counts.items()}


def pack_counts(contract: Contract, groups: Mapping[int, int]) -> list[types_pb2.GroupCount]:
    """Pack the number of blocks of each group.

    Raises:
        KVHearthError: ``bad_group``, or ``bad_message`` for a count out of range.
    """
    for group, count in groups.items():
        _check_group(contract, group)
        if not 0 <= count < 1 << 32:
            raise KVHearthError(Reason.BAD_MESSAGE, f"group {group}: {count} is not a block count")
    return [types_pb2.GroupCount(group=group, count=count) for group, count in groups.items()]


def parse_reservation(
    contract: Contract,
    welcome: Welcome,
    asked: Mapping[int, int],
    replies: Collection[types_pb2.GroupExtents],
) -> dict[int, Records]:
    """Return reserved extents by group, of shape (n, shards); a group without an answer got none.

    Raises:
        KVHearthError: ``bad_message`` if the reply does not fit the request or leaves the arena.
    """
    granted = {reply.group: reply.count for reply in replies}
    by_group = _each_once(replies, granted)
    results = {}
    for group in {*asked, *granted}:
        count, shards = granted.get(group, 0), _shards(contract, group)
        if count > asked.get(group, 0):
            raise bad_reply(f"group {group}: {count} blocks, more than asked for")
        data = by_group[group].extents if group in by_group else b""
        flat = parse_extents(contract, welcome, group, data, count * shards)
        results[group] = flat.reshape(count, shards)
    return results


def no_extents(contract: Contract, groups: Iterable[int]) -> dict[int, Records]:
    """Return empty arrays of shape (0, shards), for groups that the contract knows."""
    known = [group for group in groups if 0 <= group < len(contract.groups)]
    return {group: np.empty((0, contract.groups[group].shards), EXTENT_DTYPE) for group in known}


def pack_slots(contract: Contract, group: int, extents: Records) -> types_pb2.GroupSlots:
    """Pack slots and generations of extents of any shape.

    Raises:
        KVHearthError: ``bad_group`` or ``bad_extents``.
    """
    _check_group(contract, group)
    slots, generations, _ = _slots_of(extents)
    return types_pb2.GroupSlots(group=group, slots=slots, generations=generations)


def put_commit(contract: Contract, groups: Any, group: int, commit: CommitGroup) -> None:
    """Append one group of a commit to ``groups``, a request's ``repeated GroupCommit``.

    Raises:
        KVHearthError: ``bad_group``, ``bad_keys``, ``bad_extents`` or ``bad_checksums``.
    """
    keys = _pack_keys(contract, group, commit.keys)
    slots, generations, flat_count = _slots_of(commit.extents)
    count = len(commit.keys) * contract.groups[group].shards
    if flat_count != count:
        raise KVHearthError(
            Reason.BAD_EXTENTS,
            f"group {group}: {flat_count} extents for {len(commit.keys)} keys, must be {count}",
        )
    checksums = b""
    if commit.checksums is not None:
        sums = np.asarray(commit.checksums)
        if sums.dtype != np.uint8 or sums.size != count * CHECKSUM_BYTES:
            raise KVHearthError(
                Reason.BAD_CHECKSUMS,
                f"group {group}: checksums must be uint8 of {count} x {CHECKSUM_BYTES}",
            )
        checksums = sums.tobytes()
    if commit.parent and len(commit.parent) != contract.hash_bytes:
        raise KVHearthError(Reason.BAD_KEYS, f"group {group}: parent is not a key")
    parent, chains, parents = commit.parent, b"", b""
    if len(commit.chains) == 1:
        ((_, parent),) = commit.chains
    elif commit.chains:
        none = bytes(contract.hash_bytes)
        chains = np.array([position for position, _ in commit.chains], "<u4").tobytes()
        parents = _pack_keys(contract, group, [before or none for _, before in commit.chains])
    groups.add(
        group=group,
        keys=keys,
        slots=slots,
        generations=generations,
        checksums=checksums,
        parent=parent,
        chains=chains,
        parents=parents,
        tokens=_pack_tokens(contract, group, commit),
    )


def _pack_tokens(contract: Contract, group: int, commit: CommitGroup) -> bytes:
    if commit.tokens is None:
        return b""
    tokens = np.asarray(commit.tokens)
    shape = len(commit.keys), contract.groups[group].block_tokens
    if tokens.shape != shape or tokens.dtype != np.uint32:
        raise KVHearthError(
            Reason.BAD_KEYS, f"group {group}: tokens must be uint32 of {shape[0]} x {shape[1]}"
        )
    return tokens.astype("<u4", copy=False).tobytes()


def _pack_keys(contract: Contract, group: int, keys: Sequence[bytes]) -> bytes:
    _check_group(contract, group)
    try:
        blob = b"".join(keys)
    except TypeError as error:
        raise KVHearthError(Reason.BAD_KEYS, f"group {group}: {error}") from None
    if list(map(len, keys)).count(contract.hash_bytes) != len(keys):
        raise KVHearthError(
            Reason.BAD_KEYS, f"group {group}: keys must have {contract.hash_bytes} bytes each"
        )
    return blob


def _check_group(contract: Contract, group: int) -> None:
    if not isinstance(group, int) or not 0 <= group < len(contract.groups):
        raise KVHearthError(
            Reason.BAD_GROUP, f"group {group!r} is not in 0..{len(contract.groups) - 1}"
        )


def _shards(contract: Contract, group: int) -> int:
    if group >= len(contract.groups):
        raise bad_reply(f"group {group} is not in the contract")
    return contract.groups[group].shards


def _slots_of(extents: Records) -> tuple[bytes, bytes, int]:
    """Return slots and generations as they travel, and their number."""
    array = np.asarray(extents)
    if array.dtype != EXTENT_DTYPE:
        raise KVHearthError(Reason.BAD_EXTENTS, f"dtype {array.dtype} is not EXTENT_DTYPE")
    if array.size == 1:
        record = array.tobytes()
        return record[_SLOT], record[_GENERATION], 1
    flat = array.reshape(-1)
    return flat["slot"].tobytes(), flat["generation"].tobytes(), len(flat)


def _each_once(replies: Collection[OfGroupT], wanted: Mapping[int, int]) -> dict[int, OfGroupT]:
    by_group = {item.group: item for item in replies}
    if len(replies) != len(by_group) or by_group.keys() != wanted.keys():
        raise bad_reply(f"groups {sorted(item.group for item in replies)} answer {sorted(wanted)}")
    return by_group


def _bits(data: bytes, count: int) -> Bools:
    try:
        return unpack_bits(data, count)
    except ValueError as error:
        raise bad_reply(str(error)) from None


def _bitmaps(maps: tuple[bytes, ...], count: int) -> list[Bools]:
    """Unpack several bitmaps, most of which equal the one before."""
    found = list[Bools]()
    for index, data in enumerate(maps):
        same = index and data == maps[index - 1]
        found.append(found[-1].copy() if same else _bits(data, count))
    return found


def _tiers(data: bytes, count: int) -> U8:
    if len(data) != count:
        raise bad_reply(f"{len(data)} tiers for {count} keys")
    if unknown := data.translate(None, _TIERS):
        raise bad_reply(f"unknown tier {unknown[0]}")
    return np.frombuffer(bytearray(data), np.uint8)


def _absent_group(count: int) -> GroupResult:
    return GroupResult(
        present=np.zeros(count, np.bool_),
        ready=np.zeros(count, np.bool_),
        leased=np.zeros(count, np.bool_),
        tiers=np.zeros(count, np.uint8),
        extents=np.empty(0, EXTENT_DTYPE),
    )
