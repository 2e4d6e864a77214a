"""The trace file, version 1 (docs/trace-format.md): lookups and stores, their keys as numbers.

A key is written once, as 8 bytes of a salted hash; every use of it after that is its number. Keys
of a chain have consecutive numbers, so that a lookup is a few runs. The salt is not in the file.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from kvhearth.errors import KVHearthError, Reason
from kvhearth.keys import split_keys
from kvhearth.model import I64, U8

MAGIC = b"KVHTRACE"
VERSION = 1
HEAD = struct.Struct("<8sHHI")
"""Magic, version, 0, bytes of the JSON object that follows."""
CHUNK_HEAD = struct.Struct("<III")
"""Bytes of a chunk as they are, bytes of its content, CRC-32 of its content."""
CHUNK_BYTES = 256 << 10
CHUNK_BYTES_MAX = 64 << 20
HEAD_BYTES_MAX = 1 << 20
HASH_BYTES = 8
SPACE, LOOKUP, STORE, KEYS, LOST = range(5)
"""Kinds of records."""
KEYS_MAX = (1 << 31) - 1
"""Most different keys of a trace."""

U64 = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class TraceSpace:
    """A KV group of a namespace in one epoch.

    Attributes:
        namespace: the namespace's digest.
        block_bytes: memory that a block takes.
        contract: the contract's fields.
    """

    namespace: str
    tenant: str
    epoch: int
    group: int
    block_bytes: int
    contract: Mapping[str, Any]


class TraceWriter:
    """Writes a trace; a context that closes the file.

    Args:
        path: of a file that does not exist yet.
        facts: JSON values for the head: ``memory_bytes``, ``ssd_bytes`` of the recorded daemon.
        salt: of the keys' hashes; traces of one salt can be compared. By default a new one.

    Raises:
        KVHearthError: ``config_invalid`` if the file exists or cannot be made.
    """

    def __init__(self, path: Path, facts: Mapping[str, Any], salt: bytes = b"") -> None:
        self._salt = hashlib.blake2b(salt or secrets.token_bytes(32)).digest()
        self._ids: dict[tuple[int, bytes], int] = {}
        self._buffer = bytearray()
        self._at_us = 0
        self._expected = 0
        self.bytes = self.lookups = self.stores = self.keys = 0
        """Bytes written to the file; lookups, stores and the keys that they named."""
        try:
            self._file: BinaryIO = path.open("xb")
        except OSError as error:
            raise KVHearthError(
                Reason.CONFIG_INVALID, f"cannot write {path}: {error.strerror}; choose another file"
            ) from None
        text = json.dumps(dict(facts), sort_keys=True).encode()
        self._put(HEAD.pack(MAGIC, VERSION, 0, len(text)) + text)

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.flush()
        self._file.close()

    @property
    def distinct_keys(self) -> int:
        """Number of different keys."""
        return len(self._ids)

    def space(self, number: int, space: TraceSpace) -> None:
        """Write a space, under a number that later uses name."""
        text = json.dumps(vars(space), sort_keys=True, separators=(",", ":")).encode()
        self._buffer.append(SPACE)
        _varint(self._buffer, number)
        _varint(self._buffer, len(text))
        self._buffer += text

    def use(self, space: int, at_us: int, blob: bytes, key_bytes: int, *, store: bool) -> None:
        """Write a lookup or a store of keys in chain order, which lie side by side.

        Raises:
            KVHearthError: ``too_many_keys`` if the trace has ``KEYS_MAX`` keys.
        """
        keys, ids = split_keys(blob, key_bytes), self._ids
        new, numbers = bytearray(), list[int]()
        for key in keys:
            number = ids.get((space, key))
            if number is None:
                number = ids[space, key] = len(ids)
                new += hashlib.blake2b(
                    space.to_bytes(4, "little") + key, digest_size=HASH_BYTES, key=self._salt
                ).digest()
            numbers.append(number)
        if len(ids) > KEYS_MAX:
            raise KVHearthError(Reason.TOO_MANY_KEYS, "the trace has 2^31 keys; record for less")
        if new:
            self._buffer.append(KEYS)
            _varint(self._buffer, len(new) // HASH_BYTES)
            self._buffer += new
        self._buffer.append(STORE if store else LOOKUP)
        _varint(self._buffer, space)
        _varint(self._buffer, max(0, at_us - self._at_us))
        self._at_us = max(self._at_us, at_us)
        self._runs(numbers)
        self.keys += len(keys)
        self.stores += store
        self.lookups += not store
        if len(self._buffer) >= CHUNK_BYTES:
            self.flush()

    def lost(self, keys: int) -> None:
        """Write that keys are missing here: the daemon could not keep them for the recorder."""
        self._buffer.append(LOST)
        _varint(self._buffer, keys)

    def _runs(self, numbers: list[int]) -> None:
        runs = list[tuple[int, int]]()
        for number in numbers:
            if runs and number == runs[-1][0] + runs[-1][1]:
                runs[-1] = (runs[-1][0], runs[-1][1] + 1)
            else:
                runs.append((number, 1))
        _varint(self._buffer, len(runs))
        for start, length in runs:
            step = start - self._expected
            _varint(self._buffer, 2 * step if step >= 0 else -2 * step - 1)
            _varint(self._buffer, length)
            self._expected = start + length

    def flush(self) -> None:
        """Write what is buffered as a chunk."""
        if self._buffer:
            content = bytes(self._buffer)
            packed = zlib.compress(content, 1)
            head = CHUNK_HEAD.pack(len(packed), len(content), zlib.crc32(content))
            self._put(head + packed)
            self._buffer.clear()

    def _put(self, data: bytes) -> None:
        self._file.write(data)
        self._file.flush()
        self.bytes += len(data)


@dataclass
class Trace:
    """A trace in memory.

    Attributes:
        facts: of the head.
        spaces: by number.
        stores: whether each use is a store; shape (n,).
        use_spaces: number of each use's space.
        at_us: microseconds since the recording began.
        first_runs: index of each use's first run, and the number of runs; shape (n + 1,).
        starts, lengths: first key and number of keys of each run; shape (m,).
        hashes: salted hash of each key.
        lost_keys: keys that the recorder lost.
        cut: whether the file ends within a chunk, as one of a recorder that was killed.
    """

    facts: Mapping[str, Any]
    spaces: dict[int, TraceSpace]
    stores: npt.NDArray[np.bool_]
    use_spaces: I64
    at_us: I64
    first_runs: I64
    starts: I64
    lengths: I64
    hashes: U64
    lost_keys: int
    cut: bool

    def __len__(self) -> int:
        """Number of uses."""
        return len(self.stores)

    @property
    def lookups(self) -> int:
        """Number of lookups."""
        return len(self) - int(np.count_nonzero(self.stores))

    @property
    def key_counts(self) -> I64:
        """Number of keys of each use."""
        sums = np.concatenate(([0], np.cumsum(self.lengths)))
        counts: I64 = sums[self.first_runs[1:]] - sums[self.first_runs[:-1]]
        return counts

    @property
    def asked_keys(self) -> int:
        """Number of keys of all lookups."""
        return int(self.key_counts[~self.stores].sum())

    @property
    def seconds(self) -> float:
        """Time from the beginning to the last use."""
        return float(self.at_us[-1]) / 1e6 if len(self) else 0.0


@dataclass
class _Reading:
    """Columns of a trace that is being read."""

    spaces: dict[int, TraceSpace] = field(default_factory=dict)
    stores: list[bool] = field(default_factory=list)
    use_spaces: list[int] = field(default_factory=list)
    at_us: list[int] = field(default_factory=list)
    first_runs: list[int] = field(default_factory=lambda: [0])
    starts: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)
    key_count: int = 0
    expected: int = 0
    now_us: int = 0
    lost_keys: int = 0


def read_trace(path: Path) -> Trace:
    """Read a trace.

    Raises:
        KVHearthError: ``config_invalid`` if it cannot be read, is no trace, or is damaged.
    """
    try:
        with path.open("rb") as file:
            return _read(path, file)
    except OSError as error:
        raise KVHearthError(
            Reason.CONFIG_INVALID, f"cannot read {path}: {error.strerror}"
        ) from None


def _read(path: Path, file: BinaryIO) -> Trace:
    facts = _read_head(path, file)
    columns, cut = _Reading(), False
    while head := file.read(CHUNK_HEAD.size):
        cut = len(head) < CHUNK_HEAD.size
        if cut:
            break
        packed_bytes, content_bytes, check = CHUNK_HEAD.unpack(head)
        if max(packed_bytes, content_bytes) > CHUNK_BYTES_MAX:
            raise _damaged(path, file)
        packed = file.read(packed_bytes)
        cut = len(packed) < packed_bytes
        if cut:
            break
        content = _unpacked(packed, content_bytes)
        if content is None or zlib.crc32(content) != check or not _parse(content, columns):
            raise _damaged(path, file)
    return Trace(
        facts,
        columns.spaces,
        np.array(columns.stores, np.bool_),
        np.array(columns.use_spaces, np.int64),
        np.array(columns.at_us, np.int64),
        np.array(columns.first_runs, np.int64),
        np.array(columns.starts, np.int64),
        np.array(columns.lengths, np.int64),
        np.frombuffer(b"".join(columns.hashes), np.uint64),
        columns.lost_keys,
        cut,
    )


def _read_head(path: Path, file: BinaryIO) -> Mapping[str, Any]:
    head = file.read(HEAD.size)
    if len(head) < HEAD.size or not head.startswith(MAGIC):
        raise KVHearthError(Reason.CONFIG_INVALID, f"{path} is no trace of kvhearth trace record")
    _, version, _, size = HEAD.unpack(head)
    if version != VERSION:
        message = f"{path} is a trace of version {version}, this program reads {VERSION}"
        raise KVHearthError(Reason.CONFIG_INVALID, message)
    text = file.read(size) if size <= HEAD_BYTES_MAX else b""
    try:
        facts = json.loads(text)
    except ValueError:
        facts = None
    if not isinstance(facts, dict):
        raise _damaged(path, file)
    return facts


def _damaged(path: Path, file: BinaryIO) -> KVHearthError:
    return KVHearthError(
        Reason.CONFIG_INVALID, f"{path} is damaged before byte {file.tell()}; record it again"
    )


def _unpacked(packed: bytes, size: int) -> bytes | None:
    """Return the content of a chunk; None if it has another size."""
    reader = zlib.decompressobj()
    try:
        content = reader.decompress(packed, size + 1)
    except zlib.error:
        return None
    return content if len(content) == size else None


def _parse(content: bytes, columns: _Reading) -> bool:
    """Parse a chunk; False if it is malformed."""
    at, end = 0, len(content)
    try:
        while at < end:
            kind = content[at]
            at += 1
            if kind in (LOOKUP, STORE):
                at = _parse_use(content, at, columns, store=kind == STORE)
            elif kind == KEYS:
                count, at = _number(content, at)
                hashes = content[at : at + count * HASH_BYTES]
                if not 0 < count * HASH_BYTES == len(hashes):
                    return False
                columns.hashes.append(hashes)
                columns.key_count += count
                at += len(hashes)
            elif kind == SPACE:
                number, at = _number(content, at)
                size, at = _number(content, at)
                columns.spaces[number] = TraceSpace(**json.loads(content[at : at + size]))
                at += size
            elif kind == LOST:
                lost, at = _number(content, at)
                columns.lost_keys += lost
            else:
                return False
    except (IndexError, ValueError, TypeError):
        return False
    return at == end


def _parse_use(content: bytes, at: int, columns: _Reading, *, store: bool) -> int:
    """Parse a use and return the place after it; raises ``ValueError`` for unknown keys."""
    space, at = _number(content, at)
    passed, at = _number(content, at)
    count, at = _number(content, at)
    if space not in columns.spaces:
        raise ValueError("no such space")
    starts, lengths, expected = columns.starts, columns.lengths, columns.expected
    for _ in range(count):
        step, at = _number(content, at)
        length, at = _number(content, at)
        start = expected + (step >> 1 if not step & 1 else -(step + 1 >> 1))
        expected = start + length
        if start < 0 or expected > columns.key_count or not length:
            raise ValueError("no such key")
        starts.append(start)
        lengths.append(length)
    columns.expected = expected
    columns.now_us += passed
    columns.stores.append(store)
    columns.use_spaces.append(space)
    columns.at_us.append(columns.now_us)
    columns.first_runs.append(len(starts))
    return at


def _varint(out: bytearray, value: int) -> None:
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)


def _number(data: bytes, at: int) -> tuple[int, int]:
    """Return the number at a place, and the place after it.

    Raises:
        IndexError: the data end.
        ValueError: the number has more than 63 bits.
    """
    byte = data[at]
    if byte < 0x80:
        return byte, at + 1
    value, shift = byte & 0x7F, 7
    while True:
        at += 1
        byte = data[at]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at + 1
        shift += 7
        if shift > 56:
            raise ValueError("a number of more than 63 bits")


def key_blob(hashes: U64, key_bytes: int) -> bytes:
    """Make keys of a length of at least 8 bytes from hashes, side by side."""
    rows: U8 = np.zeros((len(hashes), key_bytes), np.uint8)
    rows[:, :HASH_BYTES] = hashes.astype("<u8").view(np.uint8).reshape(-1, HASH_BYTES)
    return rows.tobytes()
