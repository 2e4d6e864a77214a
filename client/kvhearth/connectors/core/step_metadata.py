"""Messages between the scheduler's half and the workers' halves, carried by the adapter.

Plain dataclasses of numbers, bytes and numpy arrays.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from kvhearth.contract import Contract
from kvhearth.copiers.base import BlockFailure
from kvhearth.errors import ClientReason, NoReason, Reason
from kvhearth.model import I64, U8, Bools, Records

LoadFailure = Reason | ClientReason | BlockFailure
"""Why a rank's copies of a load failed."""
STEP_TOKENS_MIN = 256
"""Smallest step, in tokens, that is reported: smaller ones say little about the rate of a
prefill.
"""


@dataclass(frozen=True)
class Geometry:
    """Mapping of ranks to the parts of a block that they hold.

    Ranks count tensor parallel first: rank = pipeline rank * ``tensor_parallel`` + tensor rank.

    Attributes:
        tensor_parallel, pipeline_parallel: sizes.
        replicas: consecutive tensor-parallel ranks that hold the same bytes (MLA, shared KV heads).
    """

    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    replicas: int = 1

    @classmethod
    def of(cls, contract: Contract, replicas: int) -> Geometry:
        """Return the mapping of a contract's ranks."""
        return cls(contract.tensor_parallel, contract.pipeline_parallel, replicas)

    @property
    def ranks(self) -> int:
        """Number of workers."""
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def shards(self) -> int:
        """Number of parts of a block."""
        return self.ranks // self.replicas

    def shard_of(self, rank: int) -> int:
        """Return the part of each block that ``rank`` holds."""
        return rank // self.replicas

    def written_by(self, rank: int, count: int) -> I64:
        """Return the positions among ``count`` blocks that ``rank`` stores: replicas share the
        work.
        """
        return np.arange(rank % self.replicas, count, self.replicas, dtype=np.int64)


@dataclass(frozen=True)
class Handshake:
    """A worker's description of itself, sent to the scheduler at startup.

    Attributes:
        contract: canonical JSON; empty if there is none.
        replicas: as in ``Geometry``.
        kv_groups: the engine's number of each of the contract's groups.
        problem: why this engine cannot use KVHearth, or empty.
    """

    contract: str
    replicas: int = 1
    kv_groups: tuple[int, ...] = ()
    problem: str = ""


@dataclass
class Move:
    """Blocks of one KV cache group: pages (n,) and extents (n, shards)."""

    pages: I64
    extents: Records


@dataclass
class LoadJob:
    """Copies from arena to pages for one waiting request. ``moves`` is keyed by the contract's
    group.
    """

    request_id: str
    boot_id: str
    moves: dict[int, Move]


@dataclass
class StoreJob:
    """Copies from pages to arena. The scheduler holds the blocks until every rank has reported."""

    number: int
    boot_id: str
    moves: dict[int, Move]


@dataclass
class StepMeta:
    """Message from scheduler to workers, once a step.

    Attributes:
        number: the step's number.
        tokens: tokens scheduled in the step.
        lost: requests whose load could not be planned and is to be reported as failed.
        finish: wait for the stores, because there may be no later step.
    """

    number: int = 0
    tokens: int = 0
    loads: list[LoadJob] = field(default_factory=list)
    stores: list[StoreJob] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    finish: bool = False


@dataclass
class RankStored:
    """Result of one rank's copies of one group of a store: ``positions`` copied, ``ok`` (n,), and
    checksums (n, 16) if the rank computed them.
    """

    rank: int
    positions: I64
    ok: Bools
    sums: U8 | None = None


@dataclass
class RankLoaded:
    """Result of one rank's copies of a load; ``bad`` holds, by group, the extents with a wrong
    checksum.
    """

    bytes: int = 0
    seconds: float = 0.0
    reason: LoadFailure | NoReason = ""
    bad: dict[int, Records] = field(default_factory=dict)


@dataclass
class WorkerReport:
    """Message from workers to scheduler, once a step; ``aggregate`` adds up those of all ranks.

    Attributes:
        steps: numbers of executed steps of ``STEP_TOKENS_MIN`` tokens or more.
        stores: by store number, (group, outcome) of each rank and group.
        stored_ranks: by store number, the number of ranks that have finished it.
        loads: by request, the outcome of each rank.
        handshakes: handshakes that the scheduler did not get at startup.
    """

    steps: list[int] = field(default_factory=list)
    stores: dict[int, list[tuple[int, RankStored]]] = field(default_factory=dict)
    stored_ranks: dict[int, int] = field(default_factory=dict)
    loads: dict[str, list[RankLoaded]] = field(default_factory=dict)
    handshakes: list[Handshake] = field(default_factory=list)

    def aggregate(self, other: WorkerReport) -> WorkerReport:
        """Return both reports as one."""
        merged = WorkerReport(
            sorted({*self.steps, *other.steps}), handshakes=self.handshakes + other.handshakes
        )
        for report in (self, other):
            for number, parts in report.stores.items():
                merged.stores.setdefault(number, []).extend(parts)
            for number, count in report.stored_ranks.items():
                merged.stored_ranks[number] = merged.stored_ranks.get(number, 0) + count
            for request_id, outcomes in report.loads.items():
                merged.loads.setdefault(request_id, []).extend(outcomes)
        return merged

    @property
    def empty(self) -> bool:
        """Whether there is nothing to report."""
        return not (self.steps or self.stored_ranks or self.loads or self.handshakes)
