"""Stores of an engine with two ranks: a block is committed once both have copied it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from support.core_kit import contract, full

from kvhearth.clock import REAL_TIME
from kvhearth.connectors.core.engine import Context, Counters, EngineGroups
from kvhearth.connectors.core.settings import Settings
from kvhearth.connectors.core.step_metadata import Geometry, RankStored, StoreJob, WorkerReport
from kvhearth.connectors.core.store_tracker import BlockRefs, Progress, StorePart, Stores
from kvhearth.model import EXTENT_DTYPE, TOKENS_UNKNOWN, TOKENS_UNPUBLISHED, Records
from kvhearth.results import CommitGroup
from kvhearth.transfer.slot_pool import Slots
from kvhearth_lab.harness import HUNG_S

CONTRACT = contract(full(shards=2))
BLOCKS = 4


class ScriptedClient:
    """A session whose slots are numbered in the order of their reservation.

    Attributes:
        commits: keys and checksums committed.
        aborted: first shards' slots given back, and whether in doubt.
    """

    contract, epoch, session_id, refusal = CONTRACT, 1, "session", None
    clock = REAL_TIME

    def __init__(self) -> None:
        self.commits: list[CommitGroup] = []
        self.aborted: list[tuple[int, bool]] = []
        self._next = 0

    def reserve(self, wanted: Mapping[int, int]) -> Any:
        """Grant everything."""
        extents = np.zeros((wanted[0], 2), EXTENT_DTYPE)
        extents["slot"][:, 0] = np.arange(self._next, self._next + wanted[0])
        self._next += wanted[0]
        return SimpleNamespace(groups={0: extents}, boot_id="boot", reason="", short_reason="")

    def commit(self, groups: Mapping[int, CommitGroup], *, boot_id: str, epoch: int) -> Any:
        """Bind everything."""
        assert (boot_id, epoch) == ("boot", self.epoch)
        self.commits.append(groups[0])
        return SimpleNamespace(reason="", stored={0: np.ones(len(groups[0].keys), np.bool_)})

    def abort(self, groups: Mapping[int, Records], *, boot_id: str, in_doubt: bool = False) -> None:
        """Take slots back."""
        assert boot_id == "boot"
        self.aborted += [(int(slot), in_doubt) for slot in groups[0]["slot"][:, 0]]


class Pages:
    """The engine's pages that somebody holds."""

    page_count = 100

    def __init__(self) -> None:
        self.held: list[int] = []

    def hold(self, pages: Sequence[int]) -> None:
        """Hold pages."""
        self.held += pages

    def release(self, pages: Sequence[int]) -> None:
        """Let pages go."""
        for page in pages:
            self.held.remove(page)

    def has_one_reference(self, page: int) -> bool:
        """Whether nobody else holds it."""
        return self.held.count(page) == 1


class Rig:
    """The tracker of an engine with two ranks, and a job of four blocks for them."""

    def __init__(self, *, publishes: bool = False, **progress: Any) -> None:
        self.client, self.pages = ScriptedClient(), Pages()
        context = SimpleNamespace(
            settings=Settings(),
            facts=SimpleNamespace(step_tokens_max=256, publishes=publishes),
            client=self.client,
            groups=EngineGroups(CONTRACT, [0], 16),
            geometry=Geometry.of(CONTRACT, 1),
            counters=Counters(),
        )
        refs = BlockRefs(self.pages, 50)
        self.stores = Stores(cast(Context, context), refs)
        assert len(self.stores._slot_pool.take(0, 1, wait_s=HUNG_S)) == 1, "no slots came"
        hashes = [bytes([number]) * 32 for number in range(BLOCKS)]
        assert self.stores.begin()
        self.stores.plan(
            Progress(hashes, [0], **progress), lambda: ([11, 12, 13, 14],), 16 * BLOCKS
        )
        [self.job] = self.stores.take_due()
        self.slots = self.job.moves[0].extents["slot"][:, 0].tolist()

    def report(self, rank: int, ok: Sequence[bool]) -> None:
        """Report the copies of a rank; its blocks' checksums are its number."""
        self.stores.reported(report_of(self.job, rank, ok))
        assert self.stores.drain(HUNG_S)

    @property
    def committed(self) -> list[list[int]]:
        """The numbers of the blocks of each commit."""
        return [[key[0] for key in each.keys] for each in self.client.commits]


def report_of(job: StoreJob, rank: int, ok: Sequence[bool]) -> WorkerReport:
    """A rank's report of the first blocks of a job."""
    sums = np.full((len(ok), 16), rank + 1, np.uint8)
    stored = RankStored(rank, np.arange(len(ok)), np.array(ok), sums)
    return WorkerReport(stores={job.number: [(0, stored)]}, stored_ranks={job.number: 1})


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.stores.close(HUNG_S)
    assert rig.pages.held == []


@pytest.mark.parametrize("how", ["tokens", "more", "adapter", "few", "off"])
def test_what_stored_blocks_hold_is_told(how: str) -> None:
    tokens = {"tokens": list(range(100)), "few": list(range(40))}.get(how)
    salt = b"adapter" if how == "adapter" else b""
    rig = Rig(publishes=how != "off", token_ids=tokens, key_salt=salt)
    for rank in (0, 1):
        rig.report(rank, [True, True, True, False])
    [commit] = rig.client.commits
    if how == "off":
        assert commit.tokens is None
    else:
        blank = TOKENS_UNPUBLISHED if how == "adapter" else TOKENS_UNKNOWN
        whole = {"tokens": 3, "few": 2}.get(how, 0)
        wanted = [*range(16 * whole), *[blank] * 16 * (3 - whole)]
        assert commit.tokens is not None
        assert commit.tokens.reshape(-1).tolist() == wanted
    rig.stores.close(HUNG_S)


def test_a_block_that_is_there_is_the_parent_of_the_next() -> None:
    rig = Rig(present={0: np.array([False, True, False])})
    for rank in (0, 1):
        rig.report(rank, [True] * 3)
    assert rig.committed == [[0, 2, 3]]
    assert list(rig.client.commits[0].chains) == [(0, b""), (1, bytes([1]) * 32)]
    rig.stores.close(HUNG_S)


def test_nothing_is_committed_before_both_ranks_have_copied(rig: Rig) -> None:
    rig.report(0, [True] * BLOCKS)
    assert rig.committed == []
    assert rig.pages.held == [11, 12, 13, 14]
    rig.report(1, [True] * BLOCKS)
    assert rig.committed == [[0, 1, 2, 3]]
    [commit] = rig.client.commits
    assert commit.extents["slot"][:, 0].tolist() == rig.slots
    assert commit.checksums is not None
    assert commit.checksums[:, :, 0].tolist() == [[1, 2]] * BLOCKS
    assert rig.client.aborted == []


@pytest.mark.parametrize("failing", [0, 1])
def test_a_block_that_one_rank_failed_to_copy_is_not_committed(rig: Rig, failing: int) -> None:
    for rank in (0, 1):
        rig.report(rank, [True, True, rank != failing, True])
    assert rig.committed == [[0, 1, 3]]
    assert rig.client.aborted == [(rig.slots[2], False)]


def test_a_block_that_one_rank_does_not_report_is_not_committed(rig: Rig) -> None:
    rig.report(1, [True] * BLOCKS)
    rig.report(0, [True])
    assert rig.committed == [[0]]
    assert rig.client.aborted == [(slot, False) for slot in rig.slots[1:]]


def test_nothing_is_committed_of_a_rank_that_never_reports(rig: Rig) -> None:
    rig.report(1, [True] * BLOCKS)
    assert rig.stores.close(HUNG_S)
    assert rig.committed == []
    in_doubt = [slot for slot, doubted in rig.client.aborted if doubted]
    assert in_doubt == rig.slots, "the rank may still write there"


def part_of(failed: list[int]) -> StorePart:
    """Six blocks of three chains on one rank, some of whose copies failed."""
    extents = np.zeros((6, 1), EXTENT_DTYPE)
    extents["slot"][:, 0] = range(10, 16)
    part = StorePart(
        keys := [bytes([number]) * 32 for number in range(6)],
        [b"a" * 32, b"", keys[1], b"c" * 32, *keys[3:5]],
        list(range(1, 7)),
        [bytes([number]) * 64 for number in range(6)],
        [Slots("boot", "session", extents[:2]), Slots("boot", "session", extents[2:])],
    )
    assert part.complete().pages.tolist() == [1, 2, 3, 4, 5, 6]
    ok, sums = np.ones(6, np.bool_), np.arange(96, dtype=np.uint8).reshape(6, 16)
    ok[failed] = False
    part.outcomes.append((0, RankStored(0, np.arange(6), ok, sums)))
    return part


def test_blocks_whose_copies_failed_leave_the_other_chains_whole() -> None:
    good, sums = (part := part_of([0, 4])).results()
    commit = part.commit_of(good, sums)
    assert [key[0] for key in commit.keys] == [1, 2, 3, 5]
    assert commit.extents["slot"].reshape(-1).tolist() == [11, 12, 13, 15]
    assert list(commit.chains) == [(0, b""), (2, b"c" * 32), (3, bytes([4]) * 32)]
    assert commit.tokens is not None
    assert (commit.tokens & 0xFF).tolist() == [[number] * 16 for number in (1, 2, 3, 5)]
    assert commit.checksums is not None
    assert commit.checksums[:, 0, 0].tolist() == [16, 32, 48, 80]


def test_a_rank_that_did_not_report_fails_all_blocks() -> None:
    part = part_of([])
    part.outcomes.clear()
    good, _ = part.results()
    assert not good.any()
