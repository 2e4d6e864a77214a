"""Golden test of a remote tier's records: written bytes and names must not change.

``python tests/golden/test_golden_remote_record.py`` rewrites the file, which only a new version of
the format may need.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
import xxhash

from kvhearth.model import CHECKSUM_BYTES, U8
from kvhearth_server.tiers.base import BlockSpec, Corrupt, Missing
from kvhearth_server.tiers.remote.names import (
    fleet_mark,
    is_object_name,
    object_name,
    space_name,
)
from kvhearth_server.tiers.remote.record import (
    Doubt,
    Head,
    Name,
    heads_of,
    payload_offset,
    read_head,
    read_heads,
    record_bytes,
)

FILE = Path(__file__).parent / "remote_record.hex"
FLEET_KEY = bytes(range(32))
SPACE = space_name(FLEET_KEY, "team-a", '{"model":"m"}', "weights 1", 2)
FAMILY = BlockSpec(bytes(32), 2, 7, 100, 2)
NAME = Name(SPACE, FAMILY, hashlib.sha256(b"key").digest())
PARENT = hashlib.sha256(b"parent").digest()
SHARDS = [bytes([number]) * 100 for number in (1, 2)]


def record() -> U8:
    """Return a record of two shards."""
    made = np.zeros(record_bytes(FAMILY), np.uint8)
    sums = [xxhash.xxh3_128_digest(shard) for shard in SHARDS]
    checksums = np.array([sums], f"V{CHECKSUM_BYTES}")
    (head,) = heads_of(SPACE, FAMILY, [NAME.key], checksums, [PARENT])
    made[:] = np.frombuffer(b"".join([head, *SHARDS]), np.uint8)
    return made


def test_what_is_written_is_what_was_written() -> None:
    assert record().tobytes() == bytes.fromhex(FILE.read_text().strip())


def test_what_was_written_is_read() -> None:
    head = read_head(np.frombuffer(bytes.fromhex(FILE.read_text().strip()), np.uint8), NAME)
    assert isinstance(head, Head)
    assert read_heads([record()] * 2, SPACE, FAMILY, [NAME.key] * 2) == [head] * 2
    assert head.parent == PARENT
    assert head.checksums == b"".join(map(xxhash.xxh3_128_digest, SHARDS))


def test_names_are_what_they_were() -> None:
    assert SPACE == "4c6bcc9b644ca78f688aaf7cd8e26e0b"
    name = object_name(FLEET_KEY, SPACE, NAME.key)
    assert name == f"1/{SPACE}/508dd8a397b8760e5c4ea002039e4814"
    assert is_object_name(name)
    digits = "7c3fa8eed56f179000c7a3b38bc81cbb2231c95cba1e8a8b801484c82fc74e62"
    assert fleet_mark(FLEET_KEY).decode() == f"kvhearth fleet 1 {digits}\n"


def test_every_part_of_a_name_counts() -> None:
    base = (FLEET_KEY, "a", "{}", "l", 0)
    others = [
        (bytes(32), "a", "{}", "l", 0),
        (FLEET_KEY, "b", "{}", "l", 0),
        (FLEET_KEY, "a", "{ }", "l", 0),
        (FLEET_KEY, "a", "{}", "m", 0),
        (FLEET_KEY, "a", "{}", "l", 1),
        (FLEET_KEY, "a{", "}", "l", 0),
    ]
    assert len({space_name(*each) for each in (base, *others)}) == 1 + len(others)
    assert not any(map(is_object_name, ("", "1/x/y", "2" + NAME.space, f"1/{SPACE}", "1/fleet")))


@pytest.mark.parametrize("at", [*range(payload_offset(2) - 32), 287])
def test_every_flipped_bit_of_the_head_is_found(at: int) -> None:
    changed = record()
    changed[at] ^= 16
    found = read_head(changed, NAME)
    assert isinstance(found, Doubt)
    assert read_heads([changed], SPACE, FAMILY, [NAME.key]) == [found]
    foreign = at < 6
    assert found.outcome == (Missing() if foreign else Corrupt("remote"))


@pytest.mark.parametrize(
    "name",
    [
        Name(space_name(FLEET_KEY, "b", "", "", 2), FAMILY, NAME.key),
        Name(SPACE, FAMILY, NAME.key[:-1]),
        Name(SPACE, FAMILY, bytes(32)),
        Name(SPACE, BlockSpec(bytes(32), 3, 7, 100, 2), NAME.key),
        Name(SPACE, BlockSpec(bytes(32), 2, 7, 200, 1), NAME.key),
    ],
)
def test_another_block_is_misplaced(name: Name) -> None:
    assert read_head(record(), name) is Doubt.MISPLACED
    assert read_heads([record()], name.space, name.family, [name.key]) == [Doubt.MISPLACED]


def test_other_lengths_are_damage() -> None:
    for size in (300, 256, 4):
        assert read_head(record()[:size], NAME) is Doubt.DAMAGED
    assert read_head(np.append(record(), np.uint8(0)), NAME) is Doubt.DAMAGED
    assert read_head(np.zeros(0, np.uint8), NAME) is Doubt.FOREIGN


if __name__ == "__main__":
    FILE.write_text(record().tobytes().hex() + "\n")
