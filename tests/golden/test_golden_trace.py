"""Golden test of the trace file: version 1 must not change."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

from kvhearth_server.traces.format import CHUNK_HEAD, HEAD, TraceSpace, TraceWriter, read_trace

GOLDEN = Path(__file__).parent / "trace.hex"
SPACE = TraceSpace("ab" * 32, "default", 3, 0, 65536, {"hash_bytes": 16, "model": "m"})


def keys(*numbers: int) -> bytes:
    """Keys of 16 bytes, side by side."""
    return b"".join(number.to_bytes(16, "big") for number in numbers)


def written(path: Path) -> bytes:
    """The head and the content of the example, the latter as it is before compression."""
    with TraceWriter(path, {"memory_bytes": 1 << 30, "ssd_bytes": 0}, b"salt") as writer:
        writer.space(0, SPACE)
        writer.use(0, 1000, keys(*range(300)), 16, store=False)
        writer.use(0, 1500, keys(*range(300)), 16, store=True)
        writer.lost(7)
        writer.use(0, 200_000, keys(5, 6, 7, 2, 300), 16, store=False)
    data = path.read_bytes()
    _, _, _, size = HEAD.unpack_from(data)
    at = HEAD.size + size
    packed, length, check = CHUNK_HEAD.unpack_from(data, at)
    content = zlib.decompress(data[at + CHUNK_HEAD.size :])
    assert packed == len(data) - at - CHUNK_HEAD.size
    assert (length, check) == (len(content), zlib.crc32(content))
    # How zlib packs may differ from machine to machine.
    return data[:at] + content


def test_what_is_written(tmp_path: Path) -> None:
    assert written(tmp_path / "t").hex() == GOLDEN.read_text().strip()


def test_what_is_read(tmp_path: Path) -> None:
    golden = bytes.fromhex(GOLDEN.read_text())
    at = HEAD.size + struct.unpack_from("<I", golden, 12)[0]
    content = golden[at:]
    packed = zlib.compress(content)
    path = tmp_path / "t"
    head = CHUNK_HEAD.pack(len(packed), len(content), zlib.crc32(content))
    path.write_bytes(golden[:at] + head + packed)
    trace = read_trace(path)
    assert trace.facts == {"memory_bytes": 1 << 30, "ssd_bytes": 0}
    assert trace.spaces == {0: SPACE}
    assert trace.stores.tolist() == [False, True, False]
    assert trace.at_us.tolist() == [1000, 1500, 200_000]
    assert trace.first_runs.tolist() == [0, 1, 2, 5]
    assert trace.starts.tolist() == [0, 0, 5, 2, 300]
    assert trace.lengths.tolist() == [300, 300, 3, 1, 1]
    assert len(trace.hashes) == 301
    assert trace.lost_keys == 7
    assert not trace.cut
