"""Converts between messages and the core's requests and replies; checks bounds and lengths."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from kvhearth.contract import TOKEN_BYTES, Contract, GroupSpec
from kvhearth.errors import KVHearthError, Reason
from kvhearth.model import (
    CHECKSUM_BYTES,
    I64,
    U8,
    U32,
    PackedKeys,
    Tier,
    pack_bits,
    split_keys,
)
from kvhearth.proto.v1 import cache_pb2, types_pb2
from kvhearth.wire.frames import METHODS
from kvhearth_server.core.commit import Chains, CommitItem
from kvhearth_server.core.few_commits import SingleCommit
from kvhearth_server.core.lookup import KeysItem, Presence
from kvhearth_server.core.reservations import SlotsItem
from kvhearth_server.core.state import group_spec, require

GROUPS_PER_CALL_MAX = 64
IDS_PER_CALL_MAX = 4096
COUNTERS_PER_HEARTBEAT_MAX = 64
SMALL_BODY_BYTES = 32 << 10
"""Bodies up to this size are parsed unseen: even one of empty parts costs only 0.1 ms."""
_PARTS_MAX = GROUPS_PER_CALL_MAX + 2
"""Groups, and two packed lists of ids."""
_FIELDS_MAX = 2 * IDS_PER_CALL_MAX + GROUPS_PER_CALL_MAX
_ID_BYTES = 11
"""A varint of 64 bits with its tag."""
_NUMBER_BYTES = 4
_GROUP_BYTES = 32
"""Bytes of a group's numbers and lengths."""
_COUNTER_BYTES = 80
_OTHER_BYTES = 4096
_VARINT, _FIXED_64, _LENGTH, _FIXED_32 = 0, 1, 2, 5
_DRAM = bytes([Tier.DRAM])


class TooManyParts(KVHearthError):
    """More groups than a call may have; such a caller's connection is closed."""


def body_bounds(
    contract: Contract, keys_max: int, message_bytes_max: int
) -> Mapping[int, tuple[str, int]]:
    """Return each call's name and the most bytes of its body, by the call's kind.

    Args:
        contract: of the caller.
        keys_max: keys that a call may name, and slots that a release may report.
        message_bytes_max: bytes of any message.
    """
    shards = max(spec.shards for spec in contract.groups)
    each = contract.hash_bytes, shards, contract.token_bytes
    return _body_bounds(*each, keys_max, message_bytes_max)


@lru_cache(maxsize=64)
def _body_bounds(
    hash_bytes: int, shards: int, tokens: int, keys_max: int, message_bytes_max: int
) -> Mapping[int, tuple[str, int]]:
    groups, ids = GROUPS_PER_CALL_MAX * _GROUP_BYTES, IDS_PER_CALL_MAX * _ID_BYTES
    keys, slots = keys_max * hash_bytes + groups, keys_max * shards * 2 * _NUMBER_BYTES
    parents = (GROUPS_PER_CALL_MAX + keys_max) * hash_bytes + keys_max * _NUMBER_BYTES
    bounds = {
        "Heartbeat": COUNTERS_PER_HEARTBEAT_MAX * _COUNTER_BYTES,
        "Lookup": keys,
        "Reserve": groups,
        "Commit": keys + parents + slots + keys_max * (shards * CHECKSUM_BYTES + tokens),
        "Abort": groups + slots + ids,
        "Release": groups + 2 * ids + keys_max * 2 * _NUMBER_BYTES,
        "Prefetch": keys,
        "Pin": keys,
        "Unpin": ids,
        "Touch": keys,
        "BumpEpoch": 0,
        "Events": 0,
    }
    return {
        kind: (name, min(bounds[name] + _OTHER_BYTES, message_bytes_max))
        for name, kind in METHODS.items()
    }


def check_parts(data: bytes) -> None:
    """Count the parts of a body above ``SMALL_BODY_BYTES`` before it is parsed: an empty part takes
    two bytes on the wire and a message in memory.

    Raises:
        TooManyParts: more parts than any call may have.
    """
    at, end, parts, fields = 0, len(data), 0, 0
    try:
        while at < end:
            tag, at = _varint(data, at)
            kind = tag & 7
            fields += 1
            if kind == _LENGTH:
                size, at = _varint(data, at)
                at += size
                parts += 1
            elif kind == _VARINT:
                _, at = _varint(data, at)
            elif kind in (_FIXED_64, _FIXED_32):
                at += 8 if kind == _FIXED_64 else 4
            else:
                return  # no schema of ours has it; the parser says what is wrong
            if parts > _PARTS_MAX or fields > _FIELDS_MAX:
                raise TooManyParts(
                    Reason.BAD_GROUP,
                    f"more than {GROUPS_PER_CALL_MAX} groups in one call",
                )
    except IndexError:
        return  # cut short, which the parser refuses


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return the number at ``at`` and the place after it."""
    value = shift = 0
    while (byte := data[at]) & 0x80:
        value |= (byte & 0x7F) << shift
        shift += 7
        at += 1
    return value | byte << shift, at + 1


def keys_items(
    contract: Contract, groups: Sequence[types_pb2.GroupKeys], keys_max: int
) -> list[KeysItem]:
    """Return the keys of each group; they are counted before they are split."""
    _few_groups(groups)
    blobs = [(group.group, group.keys) for group in groups]
    _few_keys(sum(len(blob) for _, blob in blobs), contract, keys_max)
    return [KeysItem(number, PackedKeys(blob, contract.hash_bytes)) for number, blob in blobs]


def commit_items(
    contract: Contract, groups: Sequence[cache_pb2.GroupCommit], keys_max: int
) -> list[CommitItem]:
    """Return the commits of each group."""
    _few_groups(groups)
    _few_keys(sum(len(group.keys) for group in groups), contract, keys_max)
    items = []
    for group in groups:
        spec = group_spec(contract, group.group)
        keys = split_keys(group.keys, contract.hash_bytes)
        slots = _matrix(group.slots, len(keys), spec, "slots").astype(np.int64)
        generations = _matrix(group.generations, len(keys), spec, "generations")
        sums = _checksums(group.checksums, len(keys), spec)
        chains = _chains(group, contract, len(keys))
        _check_tokens(group.tokens, len(keys), spec)
        items.append(CommitItem(group.group, keys, slots, generations, sums, group.parent, chains))
    return items


def _check_tokens(data: bytes, count: int, spec: GroupSpec) -> None:
    size = count * spec.block_tokens * TOKEN_BYTES
    require(
        len(data) in (0, size),
        Reason.BAD_KEYS,
        f"tokens: {len(data)} bytes, not {size} for {count} keys",
    )


def told_tokens(
    contract: Contract, group: cache_pb2.GroupCommit
) -> list[tuple[bytes, bytes, bytes]]:
    """Return the keys of a checked commit that tells tokens, each with the key before it (zeros:
    none) and its tokens.
    """
    size, count = contract.hash_bytes, contract.groups[group.group].block_tokens
    keys, tokens = split_keys(group.keys, size), split_keys(group.tokens, count * TOKEN_BYTES)
    parents = [group.parent if len(group.parent) == size else bytes(size), *keys[:-1]]
    starts = _numbers(group.chains, "chains").tolist()
    for start, parent in zip(starts, split_keys(group.parents, size), strict=True):
        parents[start] = parent
    return list(zip(keys, parents, tokens, strict=True))


def _chains(group: cache_pb2.GroupCommit, contract: Contract, key_count: int) -> Chains | None:
    """Return the chains of a commit of several; None for one chain."""
    if not group.chains and not group.parents:
        return None
    starts = _numbers(group.chains, "chains").astype(np.int64)
    parents = split_keys(group.parents, contract.hash_bytes)
    good = 0 < len(starts) <= key_count and not starts[0] and starts[-1] < key_count
    require(
        bool(good and (starts[1:] > starts[:-1]).all()) and len(starts) == len(parents),
        Reason.BAD_KEYS,
        "chains must begin at ascending positions of keys, from 0, each with a parent",
    )
    none = bytes(contract.hash_bytes)
    return Chains(starts, [b"" if parent == none else parent for parent in parents])


FEW_MAX = 16
"""Most blocks of a commit that are bound one by one; for more, work on arrays is cheaper."""


def few_commits(
    contract: Contract, groups: Sequence[cache_pb2.GroupCommit]
) -> list[SingleCommit] | None:
    """Return a commit of a few blocks, each of another chain and in one slot; None if
    ``commit_items`` must parse it.
    """
    if len(groups) != 1:
        return None
    group, size = groups[0], contract.hash_bytes
    count = len(group.keys) // size
    if not 0 < count <= FEW_MAX or len(group.keys) != count * size:
        return None
    if group.chains:
        if group.chains != _each_a_chain(count) or len(group.parents) != count * size:
            return None
        parents = split_keys(group.parents, size)
    elif count > 1 or group.parents:
        return None
    else:
        parents = [group.parent]
    if not len(group.slots) == len(group.generations) == count * _NUMBER_BYTES:
        return None
    if len(group.checksums) not in (0, count * CHECKSUM_BYTES):
        return None
    if group.tokens:
        _check_tokens(group.tokens, count, group_spec(contract, group.group))
    sums = [b""] * count
    if group.checksums:
        sums = split_keys(group.checksums, CHECKSUM_BYTES)
    none, number, numbers = bytes(size), group.group, f"<{count}I"
    return [
        SingleCommit(number, key, slot, generation, checksum, b"" if parent == none else parent)
        for key, slot, generation, checksum, parent in zip(
            split_keys(group.keys, size),
            struct.unpack(numbers, group.slots),
            struct.unpack(numbers, group.generations),
            sums,
            parents,
            strict=True,
        )
    ]


@lru_cache(maxsize=FEW_MAX)
def _each_a_chain(count: int) -> bytes:
    return np.arange(count, dtype="<u4").tobytes()


def counts(groups: Sequence[types_pb2.GroupCount], blocks_max: int) -> list[tuple[int, int]]:
    """Return the number of blocks of each group, as (group, blocks)."""
    _few_groups(groups)
    total = sum(group.count for group in groups)
    require(
        total <= blocks_max,
        Reason.TOO_MANY_KEYS,
        f"{total} blocks in one call, at most {blocks_max}",
    )
    return [(group.group, group.count) for group in groups]


def slots_items(groups: Sequence[types_pb2.GroupSlots], slots_max: int) -> list[SlotsItem]:
    """Return each group's slots with their generations, flat."""
    _few_groups(groups, Reason.TOO_MANY_KEYS)
    total = sum(len(group.slots) for group in groups) // _NUMBER_BYTES
    require(
        total <= slots_max,
        Reason.TOO_MANY_KEYS,
        f"{total} slots in one call, at most {slots_max}",
    )
    items = []
    for group in groups:
        slots: I64 = _numbers(group.slots, "slots").astype(np.int64)
        generations = _numbers(group.generations, "generations")
        require(
            len(slots) == len(generations),
            Reason.BAD_EXTENTS,
            f"{len(slots)} slots but {len(generations)} generations",
        )
        items.append(SlotsItem(slots, generations))
    return items


def add_presence(groups: Any, one: Presence) -> None:
    """Add the answer for one group to a reply's ``groups``, in place: else it would be copied."""
    if one.leased is one.present:  # every block is present and leased
        count = len(one.present)
        bits = ((1 << count) - 1).to_bytes((count + 7) // 8, "little")
        groups.add(
            group=one.kv_group,
            present=bits,
            ready=bits,
            tiers=_DRAM * count,
            leased=bits,
            extents=one.extents.tobytes(),
        )
        return
    groups.add(
        group=one.kv_group,
        present=pack_bits(one.present),
        ready=pack_bits(one.ready),
        tiers=one.tiers.tobytes(),
        leased=pack_bits(one.leased),
        extents=one.extents.tobytes(),
    )


def bitmaps(
    kv_groups: Iterable[int], flags: Iterable[np.ndarray[tuple[int], np.dtype[np.bool_]]]
) -> list[types_pb2.GroupBitmap]:
    """Return one bitmap for each group."""
    return [
        types_pb2.GroupBitmap(group=group, bits=pack_bits(bits))
        for group, bits in zip(kv_groups, flags, strict=True)
    ]


def _few_keys(key_blob_bytes: int, contract: Contract, keys_max: int) -> None:
    count = key_blob_bytes // contract.hash_bytes
    if count > keys_max:
        raise KVHearthError(Reason.TOO_MANY_KEYS, f"{count} keys in one call, at most {keys_max}")


def _few_groups(groups: Sequence[object], reason: Reason = Reason.BAD_GROUP) -> None:
    if len(groups) > GROUPS_PER_CALL_MAX:
        raise TooManyParts(
            reason, f"{len(groups)} groups in one call, at most {GROUPS_PER_CALL_MAX}"
        )


def _numbers(data: bytes, what: str) -> U32:
    if len(data) % 4:
        raise KVHearthError(Reason.BAD_EXTENTS, f"{what}: {len(data)} bytes are not whole u32")
    return np.frombuffer(data, "<u4")


def _matrix(data: bytes, count: int, spec: GroupSpec, what: str) -> U32:
    numbers = _numbers(data, what)
    if len(numbers) != count * spec.shards:
        raise KVHearthError(
            Reason.BAD_EXTENTS,
            f"{what}: {len(numbers)} for {count} keys of {spec.shards} shards each",
        )
    return numbers.reshape(count, spec.shards)


def _checksums(data: bytes, count: int, spec: GroupSpec) -> U8 | None:
    if not data:
        return None
    if len(data) != count * spec.shards * CHECKSUM_BYTES:
        raise KVHearthError(
            Reason.BAD_CHECKSUMS,
            f"{len(data)} bytes for {count} x {spec.shards} checksums of {CHECKSUM_BYTES}",
        )
    return np.frombuffer(data, np.uint8).reshape(count, spec.shards, CHECKSUM_BYTES)


TEXT_BYTES_MAX = 1024
DETAIL_NAME_BYTES_MAX = 64
DETAILS_MAX = 4


def plain_text(text: str, bytes_max: int = TEXT_BYTES_MAX) -> str:
    """Cut ``text`` to ``bytes_max`` bytes of UTF-8, and write half surrogate pairs as escapes."""
    data = text[:bytes_max].encode("utf-8", "backslashreplace")
    return data[:bytes_max].decode("utf-8", "ignore")


def plain_error(error: KVHearthError) -> KVHearthError:
    """Return the same error with texts that fit into every frame and header."""
    details = list(error.details.items())[:DETAILS_MAX]
    return KVHearthError(
        error.reason,
        plain_text(error.message),
        **{plain_text(name, DETAIL_NAME_BYTES_MAX): plain_text(value) for name, value in details},
    )
