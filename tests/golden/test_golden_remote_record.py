"""Golden test of a remote tier's records: written bytes and names must not change.

``python tests/golden/test_golden_remote_record.py`` rewrites the file, which only a new version of
the format may need.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest
import xxhash

from kvhearth_server.tiers.base import BlockSpec
from kvhearth_server.tiers.remote.helper.sealing import Sealer
from kvhearth_server.tiers.remote.names import (
    fleet_mark,
    is_object_name,
    object_names,
    space_name,
)
from kvhearth_server.tiers.remote.record import (
    HEADER_BYTES,
    Head,
    Name,
    Suspect,
    record_bytes,
)

FILE = Path(__file__).parent / "remote_record.hex"
FLEET_KEY = bytes(range(32))
SPACE = space_name(FLEET_KEY, "team-a", '{"model":"m"}', "weights 1", 2)
SPEC = BlockSpec(bytes(32), 2, 7, 100, 2)
KEY = hashlib.sha256(b"key").digest()
NAME = Name(object_names(FLEET_KEY, SPACE, [KEY])[0], SPACE, SPEC, KEY)
PARENT = hashlib.sha256(b"parent").digest()
SHARDS = [bytes([number]) * 100 for number in (1, 2)]
CHECKSUMS = b"".join(map(xxhash.xxh3_128_digest, SHARDS))


def record(checksums: bytes = CHECKSUMS, fleet_key: bytes = FLEET_KEY) -> bytearray:
    """Return a record of two shards."""
    made = bytearray(record_bytes(SPEC))
    sealer = Sealer(fleet_key, random=lambda count: bytes(range(200, 200 + count)))
    sealer.seal(NAME, PARENT, checksums, list(map(memoryview, SHARDS)), memoryview(made))
    return made


def opened(
    data: bytes, name: Name = NAME, fleet_key: bytes = FLEET_KEY
) -> tuple[Head | Suspect, list[bytearray]]:
    """Open a record; return what was found, and the shards."""
    shards = [bytearray(name.family.length) for _ in range(name.family.shards)]
    found = Sealer(fleet_key).open(name, memoryview(data), list(map(memoryview, shards)))
    return found, shards


def test_what_is_written_is_what_was_written() -> None:
    assert record() == bytes.fromhex(FILE.read_text().strip())


def test_what_was_written_is_read() -> None:
    found = opened(bytes.fromhex(FILE.read_text().strip()))
    assert found == (Head(CHECKSUMS, PARENT), SHARDS)


def test_nothing_of_a_block_is_in_the_open() -> None:
    for plain in (NAME.key, PARENT, *SHARDS, xxhash.xxh3_128_digest(SHARDS[0])):
        assert plain[:16] not in record()


def test_each_record_has_its_own_nonce() -> None:
    made = [bytearray(record_bytes(SPEC)) for _ in range(2)]
    for each in made:
        Sealer(FLEET_KEY).seal(
            NAME, PARENT, CHECKSUMS, list(map(memoryview, SHARDS)), memoryview(each)
        )
    assert made[0][:8] == made[1][:8]
    assert made[0][8:20] != made[1][8:20], "salts"
    assert made[0][20:32] != made[1][20:32], "nonces"
    assert made[0][HEADER_BYTES:] != made[1][HEADER_BYTES:]


def test_each_record_has_a_key_of_its_own() -> None:
    """Equal random bytes under one key would encrypt equal bytes equally."""

    def sealed(name: Name, salt: int) -> bytearray:
        made = bytearray(record_bytes(SPEC))
        draw = [salt] + [7] * 23
        sealer = Sealer(FLEET_KEY, random=lambda count: bytes(draw[:count]))
        sealer.seal(name, PARENT, CHECKSUMS, list(map(memoryview, SHARDS)), memoryview(made))
        return made[HEADER_BYTES:]

    names = [NAME, replace(NAME, object=NAME.object[:-1] + "0")]
    made = [sealed(NAME, 1), sealed(NAME, 2), sealed(names[1], 1)]
    assert sealed(NAME, 1) == made[0]
    assert len(set(map(bytes, made))) == 3


def test_names_are_what_they_were() -> None:
    assert SPACE == "4c6bcc9b644ca78f688aaf7cd8e26e0b"
    (name,) = object_names(FLEET_KEY, SPACE, [NAME.key])
    assert name == f"3/{SPACE}/508dd8a397b8760e5c4ea002039e4814"
    assert is_object_name(name)
    digits = "7c3fa8eed56f179000c7a3b38bc81cbb2231c95cba1e8a8b801484c82fc74e62"
    assert fleet_mark(FLEET_KEY).decode() == f"kvhearth fleet 3 {digits}\n"


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
    others_names = ("", "3/x/y", "1" + NAME.space, f"3/{SPACE}", "3/fleet", f"2/{SPACE}/{SPACE}")
    assert not any(map(is_object_name, others_names))


def test_every_flipped_bit_is_found() -> None:
    for at in range(len(record())):
        changed = record()
        changed[at] ^= 16
        assert opened(changed)[0] is Suspect.ALTERED, at


@pytest.mark.parametrize(
    "name",
    [
        replace(NAME, object=NAME.object[:-1] + "0"),
        replace(NAME, space=space_name(FLEET_KEY, "b", "", "", 2)),
        replace(NAME, key=NAME.key[:-1]),
        replace(NAME, key=bytes(32)),
        replace(NAME, family=BlockSpec(bytes(32), 3, 7, 100, 2)),
        replace(NAME, family=BlockSpec(bytes(32), 2, 7, 200, 1)),
        replace(NAME, family=BlockSpec(bytes(32), 2, 7, 184, 1)),
    ],
)
def test_a_record_opens_under_its_own_name_only(name: Name) -> None:
    assert opened(record(), name)[0] is Suspect.ALTERED


def test_other_keys_lengths_and_versions_are_found() -> None:
    assert opened(record(fleet_key=bytes(32)))[0] is Suspect.ALTERED
    for data in (record()[:-1], record() + b"\0", b"", bytes(300)):
        assert opened(data)[0] is Suspect.ALTERED
    assert opened(bytes(record_bytes(SPEC)))[0] is Suspect.ALTERED


def test_bytes_that_changed_under_way_are_torn() -> None:
    assert opened(record(checksums=bytes(32)))[0] is Suspect.TORN


if __name__ == "__main__":
    FILE.write_text(record().hex() + "\n")
