"""Golden tests of formats that outlive a version: they must not change."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import numpy as np
import xxhash

from kvhearth import Contract, GroupKind, GroupSpec
from kvhearth.contract import namespace_digest
from kvhearth.keys import chain_keys, fold_key
from kvhearth.model import EXTENT_DTYPE
from kvhearth.transports import base
from kvhearth.wire import frames
from kvhearth.wire.handshake import Hello, encode_frame
from kvhearth_server.core.slot_table import State
from kvhearth_server.memory.journal import (
    HEADER_DTYPE,
    MAGIC,
    STATE_WORDS,
    VERSION,
    identity_check,
    owner_check,
    sum_check,
)

FOLDER = Path(__file__).parent

CONTRACT = Contract(
    model="org/model",
    revision="abc123",
    kv_dtype="bfloat16",
    hash_seed="7",
    tensor_parallel=2,
    groups=(
        GroupSpec(GroupKind.FULL, 16, 65536, layers=8, token_bytes=512, shards=2),
        GroupSpec(GroupKind.SLIDING_WINDOW, 16, 65536, 8, 512, 2, window_tokens=1024),
        GroupSpec(GroupKind.MAMBA, 512, 4096, layers=4),
    ),
)


def golden(name: str) -> str:
    return (FOLDER / name).read_text().strip()


def test_the_canonical_contract_and_its_namespace() -> None:
    assert CONTRACT.to_json() == golden("contract.json")
    assert namespace_digest("default", CONTRACT).hex() == golden("namespace.hex")
    assert Contract.from_json(golden("contract.json")) == CONTRACT


def test_keys() -> None:
    keys = chain_keys(range(64), 16, seed="7", extra=[b"adapter"])
    keys.append(fold_key(keys[0], b"picture"))
    assert "\n".join(key.hex() for key in keys) == golden("keys.hex")


def test_an_attach_frame() -> None:
    hello = Hello(1, "engine", CONTRACT.to_json(), rank=1, scheduler=False, pid=7)
    assert encode_frame(hello.to_message()).hex() == golden("hello.hex")


def test_an_extent_record() -> None:
    checksum = xxhash.xxh3_128_digest(b"kvhearth")
    record = np.array([(7, 1, 3, 1 << 33, 65536, 9, checksum)], EXTENT_DTYPE)
    assert record.tobytes().hex() == golden("extent.hex")


def test_a_journal_header() -> None:
    header = np.zeros(1, HEADER_DTYPE)
    header["magic"], header["version"], header["group"], header["key_bytes"] = MAGIC, VERSION, 2, 32
    header["namespace"], header["epoch"], header["length"] = 3, 4, 65536
    header["shard"], header["shard_count"] = 1, 2
    header["sequence"], header["parent_sequence"] = 1 << 40, (1 << 40) - 1
    header["key"] = hashlib.sha256(b"key").digest() + bytes(32)
    header["generation"], header["owner"] = 11, 5
    header["owner_check"] = owner_check(header["owner"])
    header["checksum"] = xxhash.xxh3_128_digest(b"kvhearth")
    header["identity_check"] = identity_check(header)
    header["sum_check"] = sum_check(header)
    header["state"] = STATE_WORDS[State.SUMMED]
    assert header.tobytes().hex() == golden("journal_header.hex")


def test_no_flipped_bit_turns_a_state_word_into_another() -> None:
    words = list(STATE_WORDS.values())
    for one in words:
        for other in words:
            assert one == other or (one ^ other).bit_count() > 8, (hex(one), hex(other))


def test_the_calls_of_the_protocol_are_the_documented_ones() -> None:
    text = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text(encoding="utf-8")
    for name, number in frames.METHODS.items():
        words = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name).lower()
        assert f"| {number} {words} | `{name}Request` |" in text
    assert text.count("Request` |") == len(frames.METHODS)
    clients = {rpc.name for rpc in vars(base).values() if isinstance(rpc, base.Rpc)}
    assert clients == set(frames.METHODS)


def test_a_frame_is_eight_bytes_and_its_body() -> None:
    frame = frames.encode(frames.METHODS["Lookup"], 0x1234, b"body", 4)
    assert frame.hex() == "0400000002003412" + b"body".hex()
