"""Expected pages of the on-disk format. ``python tests/golden/ssd_format.py`` rewrites the golden
files, which only a new version of the format may need.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import xxhash

from kvhearth.model import Records
from kvhearth_server.tiers.ssd.format import (
    RECORD_DTYPE,
    RECORD_MAGIC,
    VERSION,
    DirectoryHead,
    SegmentHead,
    directory_page,
    footer_pages,
    seal,
    segment_page,
    write_footer,
)

FOLDER = Path(__file__).parent
HEAD = SegmentHead(0x0123_4567_89AB_CDEF, 7, 256 << 20, 1_700_000_000)


def records() -> Records:
    """Return the headers of two shards of one block."""
    rows = np.zeros(2, RECORD_DTYPE)
    rows["magic"], rows["version"] = RECORD_MAGIC, VERSION
    rows["group"], rows["key_bytes"] = 2, 32
    rows["log_id"], rows["segment_sequence"] = HEAD.log_id, HEAD.sequence
    rows["position"], rows["length"], rows["epoch"] = [1, 18], 65536, 4
    rows["shard"], rows["shard_count"] = [0, 1], 2
    rows["sequence"], rows["parent_sequence"] = 1 << 40, (1 << 40) - 1
    rows["namespace"] = hashlib.sha256(b"namespace").digest()
    rows["key"] = hashlib.sha256(b"key").digest() + bytes(32)
    rows["checksum"] = [xxhash.xxh3_128_digest(text) for text in (b"first", b"second")]
    seal(rows)
    return rows


def pages() -> dict[str, bytes]:
    """Return each golden file's bytes without trailing zeros."""
    footer = np.zeros(footer_pages(2) * 4096, np.uint8)
    write_footer(footer, HEAD, [records()], 35)
    lines = footer.tobytes()
    return {
        "ssd_directory": directory_page(DirectoryHead(HEAD.log_id, HEAD.segment_bytes)),
        "ssd_segment": segment_page(HEAD),
        "ssd_record": records()[:1].tobytes(),
        "ssd_footer_lines": lines[:-4096],
        "ssd_footer_page": lines[-4096:],
    }


def golden(name: str) -> bytes:
    """Return the content of a golden file."""
    return bytes.fromhex((FOLDER / f"{name}.hex").read_text().strip())


if __name__ == "__main__":
    for name, page in pages().items():
        (FOLDER / f"{name}.hex").write_text(page.rstrip(b"\0").hex() + "\n")
