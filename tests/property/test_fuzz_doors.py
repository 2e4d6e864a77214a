"""Arbitrary input to every decoder of a peer's bytes: it yields a value or a ``KVHearthError``."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.fuzz import changed, fuzz, texts, values

from kvhearth.contract import (
    CONTRACT_JSON_BYTES_MAX,
    Contract,
    GroupKind,
    GroupSpec,
    differences,
    namespace_digest,
)
from kvhearth.errors import KVHearthError, Reason
from kvhearth.proto.v1 import cache_pb2, types_pb2
from kvhearth.version import PROTOCOL_VERSION
from kvhearth.wire.frames import NAMES, decode_status, encode_status
from kvhearth.wire.handshake import (
    FRAME_BYTES_MAX,
    FrameDecoder,
    Hello,
    SegmentInfo,
    Welcome,
    encode_frame,
    refused,
)
from kvhearth_server.core.lookup import blocks_needed, hit_boundaries
from kvhearth_server.transport.messages import (
    COUNTERS_PER_HEARTBEAT_MAX,
    GROUPS_PER_CALL_MAX,
    IDS_PER_CALL_MAX,
    SMALL_BODY_BYTES,
    TEXT_BYTES_MAX,
    TooManyParts,
    body_bounds,
    check_parts,
    commit_items,
    counts,
    keys_items,
    plain_error,
    plain_text,
    slots_items,
)

GROUPS = (
    GroupSpec(GroupKind.FULL, 16, 4096, shards=2),
    GroupSpec(GroupKind.SLIDING_WINDOW, 16, 4096, window_tokens=40),
    GroupSpec(GroupKind.MAMBA, 64, 8192),
)
CONTRACT = Contract("m", "r", "uint8", GROUPS, tensor_parallel=2)
HELLO = Hello(PROTOCOL_VERSION, "e", CONTRACT.to_json())
WELCOME = Welcome("b", 1, "t", 1, "n", 1, 9, 9, 9, 9, [SegmentInfo(0, 4096, 4096)])


def tried(decode: Callable[[], Any]) -> Any:
    """Returns the decoded value, or None if it was rejected. Any other exception is a failure."""
    with contextlib.suppress(KVHearthError):
        return decode()
    return None


# -- frames ------------------------------------------------------------------------------------


def fed(data: bytes, cuts: list[int]) -> tuple[list[dict[str, Any]], bool]:
    """Returns a decoder's messages for data that arrives in pieces, and whether it rejected any of
    it.
    """
    decoder, found, start = FrameDecoder(), [], 0
    for end in [*sorted(cut % (len(data) + 1) for cut in cuts), len(data)]:
        try:
            found += decoder.feed(data[start:end])
        except KVHearthError:
            return found, True
        start = end
    return found, False


@fuzz(200)
@given(
    st.lists(st.dictionaries(texts, values, max_size=3), max_size=4),
    st.lists(st.integers(0, 5000), max_size=4),
)
def test_frames_come_out_as_they_went_in(messages: list[dict[str, Any]], cuts: list[int]) -> None:
    data = b"".join(encode_frame(message) for message in messages)
    found, refused_some = fed(data, cuts)
    assert not refused_some
    assert [json.dumps(one) for one in found] == [json.dumps(one) for one in messages]


@fuzz(200)
@given(st.binary(max_size=300))
@example(b"[" * 100_000)
@example(b'{"a":' * 50_000)
@example(b"1" * 10_000)
@example(b"\xff\xfe{\0}\0")
@example(b'{"\\ud800": "\\udfff"}')
def test_any_body_of_a_frame(body: bytes) -> None:
    fed(struct.pack("<I", len(body)) + body, [])


def test_a_decoder_keeps_no_more_than_a_frame() -> None:
    decoder = FrameDecoder()
    with pytest.raises(KVHearthError, match="at most"):
        decoder.feed(struct.pack("<I", FRAME_BYTES_MAX + 1))
    with pytest.raises(KVHearthError, match="at most"):
        encode_frame({"a": "x" * FRAME_BYTES_MAX})


# -- messages ------------------------------------------------------------------------------------


@fuzz(200)
@given(changed(HELLO.to_message()) | st.dictionaries(texts, values, max_size=4))
def test_any_hello(message: dict[str, Any]) -> None:
    hello = tried(lambda: Hello.from_message(message))
    if hello is not None:
        assert Hello.from_message(hello.to_message()) == hello
        tried(lambda: Contract.from_json(hello.contract))


@fuzz(200)
@given(changed(WELCOME.to_message()) | st.dictionaries(texts, values, max_size=4))
@example({**WELCOME.to_message(), "segments": [7]})
def test_any_welcome(message: dict[str, Any]) -> None:
    welcome = tried(lambda: Welcome.from_message(message))
    if welcome is not None:
        assert Welcome.from_message(welcome.to_message()) == welcome


@fuzz(200)
@given(changed({**WELCOME.to_message()["segments"][0]}))
@example({**WELCOME.to_message()["segments"][0], "unpopulated": {}})
@example({**WELCOME.to_message()["segments"][0], "unpopulated": [0, None]})
def test_any_segment_of_a_welcome(segment: dict[str, Any]) -> None:
    message = {**WELCOME.to_message(), "segments": [segment]}
    welcome = tried(lambda: Welcome.from_message(message))
    if welcome is not None:
        *numbers, unpopulated = dataclasses.astuple(welcome.segments[0])
        assert all(type(value) is int for value in [*numbers, *unpopulated])


# -- contracts -----------------------------------------------------------------------------------


@st.composite
def contracts(draw: st.DrawFn) -> str:
    """Draws a contract's JSON, slightly or badly wrong."""
    message = draw(changed(json.loads(CONTRACT.to_json())))
    if draw(st.booleans()):
        group = dataclasses.asdict(draw(st.sampled_from(GROUPS)))
        message["groups"] = [draw(changed(group))]
    return json.dumps(message)


def tame(contract: Contract) -> bool:
    """Whether its numbers are within the range of the core's arithmetic."""
    steps = math.lcm(*(group.block_tokens for group in contract.groups))
    windows = max(group.window_tokens for group in contract.groups)
    return max(steps, windows) < 1 << 63


@fuzz(200)
@given(contracts() | st.text(max_size=50))
def test_any_contract(text: str) -> None:
    contract = tried(lambda: Contract.from_json(text))
    if contract is None:
        return
    canonical = contract.to_json()
    if len(canonical) <= CONTRACT_JSON_BYTES_MAX:
        assert Contract.from_json(canonical) == contract
    assert len(namespace_digest("t", contract)) == 32
    assert differences(contract, contract) == []
    differences(contract, CONTRACT)
    if tame(contract):
        looked_up(contract)


def looked_up(contract: Contract) -> None:
    """Computes what the core computes for a lookup."""
    ready = np.ones(3, np.bool_)
    found = hit_boundaries([(group, ready) for group in contract.groups])
    for spec in contract.groups:
        for hit in list(found)[:2]:
            need = blocks_needed(spec, int(hit))
            assert 0 <= need.start <= need.stop <= 3


PRIMES = (1048573, 1048571, 1048559, 1048549, 1048517)
FAR = (
    tuple(GroupSpec(GroupKind.FULL, prime, 4096) for prime in PRIMES),
    (GroupSpec(GroupKind.SLIDING_WINDOW, 16, 4096, window_tokens=1 << 30),),
)


@pytest.mark.parametrize("groups", FAR, ids=["block sizes without a common one", "window"])
def test_a_contract_of_great_numbers_can_be_looked_up(groups: tuple[GroupSpec, ...]) -> None:
    looked_up(Contract("m", "r", "uint8", groups))


# -- calls ---------------------------------------------------------------------------------------

keys_max = 8
blobs = st.binary(max_size=40) | st.integers(0, 10).map(lambda count: bytes(32 * count))
words = st.binary(max_size=20) | st.integers(0, 20).map(lambda count: bytes(4 * count))
numbers = st.integers(0, 3) | st.just(0xFFFFFFFF)


@fuzz(200)
@given(st.lists(st.builds(types_pb2.GroupKeys, group=numbers, keys=blobs), max_size=70))
def test_any_keys(groups: list[types_pb2.GroupKeys]) -> None:
    items = tried(lambda: keys_items(CONTRACT, groups, keys_max))
    if items is not None:
        assert sum(len(item.keys) for item in items) <= keys_max
        assert {len(key) for item in items for key in item.keys} <= {32}


commits = st.builds(
    cache_pb2.GroupCommit,
    group=numbers,
    keys=blobs,
    slots=words,
    generations=words,
    checksums=words | st.integers(0, 20).map(lambda count: bytes(16 * count)),
    parent=blobs,
)


@fuzz(200)
@given(st.lists(commits, max_size=3))
@example([cache_pb2.GroupCommit(keys=bytes(64), slots=bytes(16), generations=bytes(16))])
def test_any_commit(groups: list[cache_pb2.GroupCommit]) -> None:
    items = tried(lambda: commit_items(CONTRACT, groups, keys_max))
    for item in items or ():
        shape = (len(item.keys), CONTRACT.groups[item.kv_group].shards)
        assert item.slots.shape == item.generations.shape == shape
        assert (item.slots >= 0).all()
        assert item.checksums is None or item.checksums.shape == (*shape, 16)


@fuzz(200)
@given(
    st.lists(
        st.builds(types_pb2.GroupSlots, group=numbers, slots=words, generations=words), max_size=70
    )
)
def test_any_slots(groups: list[types_pb2.GroupSlots]) -> None:
    items = tried(lambda: slots_items(groups, 30))
    if items is not None:
        assert sum(len(item.slots) for item in items) <= 30
        assert all(item.slots.shape == item.generations.shape for item in items)


@fuzz(200)
@given(st.lists(st.builds(types_pb2.GroupCount, group=numbers, count=numbers), max_size=70))
def test_any_counts(groups: list[types_pb2.GroupCount]) -> None:
    wants = tried(lambda: counts(groups, keys_max))
    assert wants is None or sum(count for _, count in wants) <= keys_max


@fuzz(200)
@given(st.binary(max_size=300), st.integers(0, 3))
@example(b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", 0)
@example(b"\x0a" + b"\x80" * 50_000, 0)
def test_the_parts_of_any_body(data: bytes, copies: int) -> None:
    with contextlib.suppress(TooManyParts):
        check_parts(data * copies)


@fuzz(200)
@given(st.lists(st.binary(max_size=2000), max_size=70), st.booleans())
def test_parts_are_counted_as_they_are_parsed(keys: list[bytes], lease: bool) -> None:
    groups = [types_pb2.GroupKeys(group=number, keys=key) for number, key in enumerate(keys)]
    request = cache_pb2.LookupRequest(groups=groups, epoch=7, lease_id=1 << 62 if lease else 0)
    try:
        check_parts(request.SerializeToString())
    except TooManyParts:
        assert len(keys) > GROUPS_PER_CALL_MAX
    else:
        assert len(keys) <= GROUPS_PER_CALL_MAX + 2


def largest(keys: int, shards: int, key_bytes: int, block_tokens: int) -> dict[str, Any]:
    """Returns for each call the largest request that its handler accepts."""
    group_count, number = GROUPS_PER_CALL_MAX, 0xFFFFFFFF
    ids = [(1 << 63) - 1] * IDS_PER_CALL_MAX
    shares = [keys // group_count] * (group_count - 1)
    shares.append(keys - sum(shares))
    named = [types_pb2.GroupKeys(group=number, keys=bytes(key_bytes * n)) for n in shares]
    words = [bytes(4 * shards * n) for n in shares]
    slots = [types_pb2.GroupSlots(group=number, slots=w, generations=w) for w in words]
    bad = [types_pb2.GroupSlots(group=number, slots=w[: 4 * n], generations=w[: 4 * n])
           for w, n in zip(words, shares, strict=True)]  # fmt: skip
    commits = [
        cache_pb2.GroupCommit(
            group=number, keys=each.keys, slots=word, generations=word,
            checksums=word * 4, parent=bytes(key_bytes), tokens=bytes(4 * block_tokens * n),
        )
        for each, word, n in zip(named, words, shares, strict=True)
    ]  # fmt: skip
    counters = {f"{index:048}": (1 << 64) - 1 for index in range(COUNTERS_PER_HEARTBEAT_MAX)}
    huge = (1 << 64) - 1
    lists = [types_pb2.GroupCount(group=number, count=number)] * group_count
    return {
        "Heartbeat": cache_pb2.HeartbeatRequest(counters=counters),
        "Lookup": cache_pb2.LookupRequest(groups=named, epoch=huge, lease_id=huge, prefetch=True),
        "Reserve": cache_pb2.ReserveRequest(reservation_id=huge, epoch=huge, groups=lists),
        "Commit": cache_pb2.CommitRequest(epoch=huge, groups=commits),
        "Abort": cache_pb2.AbortRequest(groups=slots, reservation_ids=ids, in_doubt=True),
        "Release": cache_pb2.ReleaseRequest(lease_ids=ids, bad=bad, cancelled_ids=ids),
        "Prefetch": cache_pb2.PrefetchRequest(groups=named, epoch=huge),
        "Pin": cache_pb2.PinRequest(pin_id=huge, groups=named, epoch=huge, ttl_ms=huge),
        "Unpin": cache_pb2.UnpinRequest(pin_ids=ids),
        "Touch": cache_pb2.TouchRequest(groups=named, epoch=huge),
        "BumpEpoch": cache_pb2.BumpEpochRequest(expected_epoch=huge, only_alone=True),
        "Events": cache_pb2.EventsRequest(cursor="9" * 100, blocks_max=number, epoch=huge),
    }


@pytest.mark.parametrize(("keys", "shards", "key_bytes"), [(8192, 1, 32), (400, 8, 64), (1, 1, 16)])
def test_the_largest_request_of_each_call_is_within_its_bound(
    keys: int, shards: int, key_bytes: int
) -> None:
    spec = GroupSpec(GroupKind.FULL, 16, 4096, shards=shards)
    told = Contract("m", "r", "uint8", (spec,), hash_bytes=key_bytes, tensor_parallel=shards)
    bounds = body_bounds(told, keys, 1 << 30)
    requests = largest(keys, shards, key_bytes, spec.block_tokens)
    assert {name for name, _ in bounds.values()} == set(NAMES.values()) == set(requests)
    for name, most in bounds.values():
        data = requests[name].SerializeToString()
        assert len(data) <= most, name
        check_parts(data)
    assert body_bounds(told, keys, 4096)[1][1] == 4096
    empty = b"\x0a\x00" * SMALL_BODY_BYTES
    with pytest.raises(TooManyParts):
        check_parts(empty)


# -- rejections ----------------------------------------------------------------------------------


@fuzz(200)
@given(st.sampled_from(Reason), texts, st.dictionaries(st.text("abc", min_size=1), texts))
@example(Reason.BAD_CONTRACT, "\U0001f525\ud800" * 60_000, {"field": "\udfff" * 60_000})
def test_a_refusal_fits_every_wire(reason: Reason, message: str, details: dict[str, str]) -> None:
    plain = plain_error(KVHearthError(reason, message, **details))
    assert len(encode_frame(refused(plain))) < FRAME_BYTES_MAX
    data = encode_status(plain)
    # It travels as base64 in a header; a peer accepts 8 KiB of headers in all.
    assert len(data) < 5000
    assert decode_status(data).reason is reason
    assert decode_status(data).message == plain.message


@fuzz(200)
@given(texts | st.text(), st.integers(0, 40))
@example("\U0001f525" * 1000, TEXT_BYTES_MAX)
def test_plain_text(text: str, bytes_max: int) -> None:
    plain = plain_text(text, bytes_max)
    assert len(plain.encode()) <= bytes_max
    if text.isascii():
        assert plain == text[:bytes_max]
