"""Random ids are in range and unique, across threads too."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from kvhearth.model import Ids


def test_ids_are_in_range_and_no_two_the_same() -> None:
    source = Ids()
    ids = [source.new_id() for _ in range(1000)]
    assert len(set(ids)) == 1000
    assert all(0 < each < (1 << 63) - 1 for each in ids)
    assert max(ids) > 1 << 59, "all of the range is used"


def test_threads_draw_different_ids() -> None:
    source = Ids()
    with ThreadPoolExecutor(8) as pool:
        parts = pool.map(lambda _: [source.new_id() for _ in range(500)], range(8))
        ids = [each for part in parts for each in part]
    assert len(set(ids)) == 4000
