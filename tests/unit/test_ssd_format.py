"""Lines of a footer: which ones are accepted."""

from __future__ import annotations

import numpy as np
import pytest

from kvhearth.model import Records
from kvhearth_server.tiers.ssd.format import (
    PAGE_BYTES,
    RECORD_DTYPE,
    RECORD_MAGIC,
    VERSION,
    Doubt,
    SegmentHead,
    doubts_of,
)

HEAD = SegmentHead(log_id=(1 << 64) - 5, sequence=77, segment_bytes=1 << 20, opened_at=0)


def lines(count: int = 9) -> Records:
    """Good lines: records of two pages and of three, each of one of a block's two shards."""
    rows = np.zeros(count, RECORD_DTYPE)
    rows["magic"], rows["version"], rows["key_bytes"] = RECORD_MAGIC, VERSION, 32
    rows["group"], rows["epoch"] = 255, 0xFFFF_FFFF
    rows["log_id"], rows["segment_sequence"] = HEAD.log_id, HEAD.sequence
    rows["length"] = np.where(np.arange(count) % 2, PAGE_BYTES, PAGE_BYTES + 1)
    rows["position"] = 1 + 3 * np.arange(count)
    rows["shard_count"] = 2
    rows["shard"] = np.arange(count) % 2
    return rows


def test_good_lines_are_believed() -> None:
    rows = lines()
    last = int(rows["position"][-1]) + 3
    assert doubts_of(rows, HEAD, last * PAGE_BYTES) == {}
    assert doubts_of(rows, HEAD, last * PAGE_BYTES + 1) == {}
    assert doubts_of(rows[:0], HEAD, HEAD.segment_bytes) == {}


@pytest.mark.parametrize("short_by", [1, PAGE_BYTES])
def test_a_record_that_ends_outside_is_doubted(short_by: int) -> None:
    rows = lines()
    end_bytes = (int(rows["position"][-1]) + 3) * PAGE_BYTES
    found = doubts_of(rows, HEAD, end_bytes - short_by)
    assert {reason: list(which) for reason, which in found.items()} == {Doubt.TRUNCATED: [8]}
