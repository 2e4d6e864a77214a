"""Encrypted records: hidden bytes, wrong and missing keys, swapped records, rotation, restarts."""

from __future__ import annotations

import base64
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.tiers import (
    LENGTH,
    NAMESPACE,
    PAGE,
    SEGMENT_BYTES,
    Opened,
    content_of,
    family,
    key_of,
    segment_files,
    spoil,
)

from kvhearth_server.config.load import Settings
from kvhearth_server.tier_startup import missing_keys
from kvhearth_server.tiers.base import Corrupt, Done, Missing
from kvhearth_server.tiers.ssd.format import (
    RECORD_BYTES,
    RECORD_DTYPE,
    SEALED_VERSION,
    VERSION,
    crc_good,
    key_id,
    record_pages,
    seal,
)
from kvhearth_server.tiers.ssd.sealing import Keyring

OLD, NEW, OTHER = b"o" * 32, b"n" * 32, b"x" * 32
SHAPES = [family(), family(length=3 * PAGE), family(length=700), family(shards=3, length=PAGE)]


def opened(folder: Path, *keys: bytes, **changes: Any) -> Opened:
    """A tier whose only tenant has these keys; without any, records are as they are."""
    return Opened(folder, keyring=Keyring({"a": keys}) if keys else None, **changes)


def heads(folder: Path) -> Iterator[tuple[Path, int, Any]]:
    """Yield file, page and header of every record of which the page is its own."""
    for path in segment_files(folder):
        data = np.fromfile(path, np.uint8).reshape(-1, PAGE)
        rows = np.ascontiguousarray(data[:, :RECORD_BYTES]).view(RECORD_DTYPE).reshape(-1)
        for page in range(1, len(rows)):
            if int(rows[page]["position"]) == page and crc_good(rows[page]):
                yield path, page, rows[page]


def raw(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in segment_files(folder))


@pytest.mark.parametrize("of", SHAPES, ids=lambda of: f"{of.shards}x{of.length}")
def test_the_drive_has_no_plain_bytes_and_all_come_back(tmp_path: Path, of: Any) -> None:
    with opened(tmp_path, OLD) as desk:
        desk.store_all(range(12), of)
        assert len(desk.load(range(12), of).rows(Done)) == 12
    data = raw(tmp_path)
    for number in range(12):
        for shard in range(of.shards):
            content = content_of(number, shard, of.length).tobytes()
            pieces = range(0, len(content) - 32, 32)
            assert not any(content[at : at + 32] in data for at in pieces)
    assert {int(row["version"]) for _, _, row in heads(tmp_path)} == {SEALED_VERSION}
    with opened(tmp_path, OLD) as desk:
        assert len(desk.load(range(12), of).rows(Done)) == 12


def test_checksums_are_hidden_and_nonces_differ(tmp_path: Path) -> None:
    """The same bytes twice look different, also in the header: nobody can confirm a guess."""
    with opened(tmp_path, OLD) as desk:
        desk.store_all(range(8))
        batch = desk.store_batch(range(8), family())
    rows = [row for _, _, row in heads(tmp_path)]
    assert len(rows) == 8
    assert len({row["nonce"].tobytes() for row in rows}) == 8
    plain = {bytes(sum_) for sum_ in batch.checksums.reshape(-1).tolist()}
    assert not plain & {row["checksum"].tobytes() for row in rows}
    assert all(int(row["key_id"]) == key_id(OLD) for row in rows)
    data = raw(tmp_path)
    assert not any(sum_ in data for sum_ in plain)
    assert OLD not in data


def test_records_without_keys_stay_as_they_are_and_both_are_read(tmp_path: Path) -> None:
    with opened(tmp_path) as desk:
        desk.store_all(range(4))
    assert content_of(2, 0, LENGTH).tobytes() in raw(tmp_path)
    with opened(tmp_path, OLD) as desk:
        desk.store_all(range(4, 8))
        assert len(desk.load(range(8)).rows(Done)) == 8
    versions = [int(row["version"]) for _, _, row in heads(tmp_path)]
    assert sorted(versions) == [VERSION] * 4 + [SEALED_VERSION] * 4


def test_a_flipped_bit_is_a_miss(tmp_path: Path) -> None:
    """In the payload, the tag and each field of the header, with and without a right CRC."""
    with opened(tmp_path, OLD) as desk:
        desk.store_all(range(3))
        assert spoil(tmp_path, key_of(0)) == 1
        assert desk.load([0, 1, 2]).rows(Corrupt).tolist() == [0]
        assert desk.load([0, 1]).rows(Missing).tolist() == [0]
    shutil.rmtree(tmp_path)
    fields = [*(name for name in RECORD_DTYPE.names or () if name != "crc"), "tag"]
    for name in fields:
        folder = tmp_path / name
        with opened(_made(folder), OLD) as desk:
            desk.store_all(range(2))
            _flip(folder, name)
            done = desk.load([0, 1])
            assert (done.rows(Corrupt).tolist(), done.rows(Done).tolist()) == ([0], [1]), name


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder


def _flip(folder: Path, name: str) -> None:
    """Flip a bit of a field of the first block's header, and make its CRC right again."""
    path, page, row = next(
        each for each in heads(folder) if each[2]["key"].tobytes()[:32] == key_of(0)
    )
    data = bytearray(row.tobytes())
    at = RECORD_BYTES if name == "tag" else RECORD_DTYPE.fields[name][1]  # type: ignore[index]
    with path.open("r+b") as file:
        if name == "tag":
            file.seek(page * PAGE + at)
            byte = file.read(1)[0]
            file.seek(page * PAGE + at)
            file.write(bytes([byte ^ 1]))
            return
        data[at] ^= 1
        changed = np.frombuffer(bytes(data), RECORD_DTYPE).copy()
        seal(changed)
        file.seek(page * PAGE)
        file.write(changed.tobytes())


def test_records_cannot_be_swapped(tmp_path: Path) -> None:
    """A record at another's place, header and all, is not that one."""
    with opened(tmp_path, OLD) as desk:
        desk.store_all(range(2))
        (path, first, _), (_, second, _) = heads(tmp_path)
        size = record_pages(LENGTH) * PAGE
        data = path.read_bytes()
        one, two = (data[page * PAGE :][:size] for page in (first, second))
        with path.open("r+b") as file:
            for page, record in ((first, two), (second, one)):
                file.seek(page * PAGE)
                file.write(record)
        assert len(desk.load([0, 1]).rows(Corrupt)) == 2


def test_another_key_makes_misses_and_loses_nothing(tmp_path: Path) -> None:
    with opened(tmp_path, OLD) as desk:
        desk.store_all(range(6))
    for keys in ((OTHER,), ()):
        with opened(tmp_path, *keys) as desk:
            assert len(desk.load(range(6)).rows(Missing)) == 6
            counts = desk.tier.figures().counts  # type: ignore[attr-defined]
            assert counts["dropped_no_key"] == 6
            assert dict(desk.tier.parts.restorer.keyless) == {key_id(OLD): 6}  # type: ignore[attr-defined]
    with opened(tmp_path, OTHER, OLD) as desk:
        assert len(desk.load(range(6)).rows(Done)) == 6


def test_a_torn_record_is_found_without_keys(tmp_path: Path) -> None:
    """The scan of a segment without footer needs none."""
    with opened(tmp_path, OLD) as desk:
        desk.store_all(range(3))
    spoil(tmp_path, key_of(1))
    with opened(tmp_path, OLD) as desk:
        counts = desk.tier.figures().counts  # type: ignore[attr-defined]
        assert counts["dropped_torn"] == 1
        assert desk.load(range(3)).rows(Missing).tolist() == [1]


def test_reclaiming_writes_under_the_new_key(tmp_path: Path) -> None:
    """Hot blocks are carried to the new key, until nothing is left under the old one."""
    blocks = SEGMENT_BYTES // (record_pages(LENGTH) * PAGE)
    hot = list(range(3))
    with opened(tmp_path, OLD, segments=4) as desk:
        desk.store_all(hot)
    with opened(tmp_path, NEW, OLD, segments=4) as desk:
        desk.load(hot)
        for start in range(100, 100 + 8 * blocks, blocks // 2):
            desk.store_all(range(start, start + blocks // 2))
            assert len(desk.load(hot).rows(Done)) == len(hot)
        desk.rest()
    with opened(tmp_path, NEW, segments=4) as desk:
        assert len(desk.load(hot).rows(Done)) == len(hot)


def test_missing_keys_are_told_from_full_files(tmp_path: Path) -> None:
    """What doctor asks, while no daemon runs."""
    with opened(tmp_path, OLD) as desk:
        desk.store_all(range(40))
        desk.rest()
    path = tmp_path / "keys.yaml"
    path.touch(mode=0o600)
    asked = Settings(ssd_dirs=[f"{tmp_path}=1GiB"], keys_file=path)
    for key, missing in ((NEW, {key_id(OLD)}), (OLD, set())):
        path.write_text(f"default: [{{id: k, key: {base64.b64encode(key).decode()}}}]\n")
        found = missing_keys(asked)
        assert found.keys() == missing
        assert all(count >= 15 for count in found.values())
    assert missing_keys(Settings(ssd_dirs=[f"{tmp_path}=1GiB"])).keys() == {key_id(OLD)}


def test_each_tenant_has_its_key_and_nobodys_blocks_are_not_written(tmp_path: Path) -> None:
    mine, yours, nobodys = NAMESPACE, b"y" * 32, b"z" * 32
    owners = {mine: "a", yours: "b"}
    keyring = Keyring({"a": [OLD], "b": [NEW]})
    with Opened(tmp_path, keyring=keyring) as desk:
        desk.tier.use_owners(lambda name, epoch: owners.get(name, ""))
        desk.store_all(range(2))
        desk.store_all(range(2, 4), family(namespace=yours))
        done = desk.store(range(4, 6), family(namespace=nobodys))
        assert not len(done.rows(Done))
    found = {row["namespace"].tobytes(): int(row["key_id"]) for _, _, row in heads(tmp_path)}
    assert found == {mine: key_id(OLD), yours: key_id(NEW)}


def test_memory_for_encryption_is_bounded(tmp_path: Path) -> None:
    """More requests than there is memory for wait, and all are done."""
    with opened(tmp_path, OLD, segments=16, bounce_bytes=64 << 10, request_bytes=16 << 10) as desk:
        desk.store_all(range(96))
        assert len(desk.load(range(96)).rows(Done)) == 96
        executor = desk.tier.parts.executor  # type: ignore[attr-defined]
        for memory in (executor._read_memory, executor._write_memory):
            assert memory._lent == 0
            assert memory._free_bytes <= 64 << 10


def test_a_cancelled_load_leaves_the_next_one_alone(tmp_path: Path) -> None:
    with opened(tmp_path, OLD) as desk:
        desk.store_all(range(40))
        ticket = desk.tier.submit_load(desk.load_batch(range(40), family()))
        assert isinstance(ticket, int)
        desk.tier.cancel(ticket)
        desk.wait(ticket)
        assert len(desk.load(range(40)).rows(Done)) == 40
