"""Random stores, loads and pauses: drives never write more than their budget.

A failure prints the steps and a blob that repeats them.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.tiers import SEGMENT_BYTES, Opened

from kvhearth_server.tiers.ssd.write_limits import DAY_S

SEGMENTS_A_DAY = 240
BURST_BYTES = SEGMENTS_A_DAY * SEGMENT_BYTES // 24 // 10
"""Bytes that a fresh daemon may write at once."""

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("store"), st.integers(1, 32)),
        st.tuples(st.just("load"), st.integers(0, 100)),
        st.tuples(st.just("pass"), st.sampled_from([0, 10, 60, 360, 3600])),
        st.tuples(st.just("rest"), st.just(0)),
    ),
    min_size=10,
    max_size=60,
)


class Driven(Opened):
    """A tier that takes steps."""

    def __init__(self, folders: list[Path], *, prewrite: bool) -> None:
        day = SEGMENTS_A_DAY * SEGMENT_BYTES
        super().__init__(*folders, segments=6, bytes_per_day=day, prewrite=prewrite)
        self.began = self.drive.clock.now
        self.stored = 0

    def take(self, what: str, number: int) -> None:
        """Takes one step; then the bound must hold."""
        if what == "store":
            self.store(range(self.stored, self.stored + number))
            self.stored += number
        elif what == "load":
            end = self.stored * number // 100
            if end:
                self.load(range(max(0, end - 16), end))
        elif what == "pass":
            self.drive.clock.now += number
        else:
            self.idle()
        self.check_budget()

    def check_budget(self) -> None:
        """Checks that writes keep to the budget, except for a debt of at most one segment."""
        days = (self.drive.clock.now - self.began) / DAY_S
        allowed = BURST_BYTES + days * SEGMENTS_A_DAY * SEGMENT_BYTES
        written = self.counts["written_bytes"]
        assert written <= allowed + SEGMENT_BYTES, f"{written} of {allowed:.0f}"


@settings(
    max_examples=30,
    deadline=None,
    print_blob=True,
    suppress_health_check=list(HealthCheck),
)
@given(steps=STEPS, drives=st.integers(1, 2), prewrite=st.booleans())
def test_never_more_than_the_budget(
    steps: list[tuple[str, int]], drives: int, *, prewrite: bool
) -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        Driven([Path(folder) / str(n) for n in range(drives)], prewrite=prewrite) as driven,
    ):
        for step in steps:
            driven.take(*step)
        driven.drain()
        driven.check_budget()


@pytest.mark.parametrize("prewrite", [False, True])
def test_two_hours_of_a_budget_with_hot_blocks(tmp_path: Path, *, prewrite: bool) -> None:
    with Driven([tmp_path / "one"], prewrite=prewrite) as driven:
        for _ in range(240):
            for step in (("pass", 30), ("store", 32), ("load", 100), ("load", 80)):
                driven.take(*step)
        # Two hours bring 20 segments: they are used, partly for hot blocks.
        assert driven.counts["written_bytes"] > 18 * SEGMENT_BYTES
        assert driven.counts["carried_blocks"] > 0
