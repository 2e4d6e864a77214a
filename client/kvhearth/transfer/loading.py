"""One load: its request, its copies under way, its outcome."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from kvhearth.copiers.base import Copier, Done, Ticket
from kvhearth.errors import Reason
from kvhearth.model import I64, Bools, Records
from kvhearth.results import LookupResult
from kvhearth.transfer.copier_pool import CopierPool
from kvhearth.transfer.hit import PromotionWait
from kvhearth.transfer.pages import KeysAndPages, page_numbers


@dataclass(frozen=True)
class LoadTicket:
    """One submitted load.

    Attributes:
        number: unique in its pipeline, from 1.
        blocks: number of requested blocks, over all groups.
    """

    number: int
    blocks: int


@dataclass(frozen=True, eq=False)
class LoadDone:
    """Outcome of a load; its pages are the engine's again. Handed out once.

    Attributes:
        ticket: the load.
        hit_tokens: tokens that the daemon had, from the start.
        usable_tokens: the longest run of tokens from the start that the loaded blocks of all groups
            allow to compute on; the rest must be recomputed. Less than ``hit_tokens`` only where a
            block failed.
        loaded: by group, (n,): True for the pages that hold their keys' bytes. The contents of
            other pages are undefined.
        reason: why the daemon was not asked, or a block failed (a reason of the error table or a
            ``BlockFailure``), or empty. Empty with 0 tokens is a miss.
        bytes: bytes copied into pages that hold their keys' bytes.
        seconds: time from the begin of the first lookup to the end of the last copy.
    """

    ticket: LoadTicket
    hit_tokens: int
    usable_tokens: int
    loaded: dict[int, Bools]
    reason: str = ""
    bytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Climb:
    """Promotion options of a load: whether to start promotions, and the seconds to wait."""

    prefetch: bool = False
    seconds: float = 0.0


@dataclass(eq=False)
class LoadJob:
    """Internal state of one load. Modified only by the pipeline's thread, except ``cancelled``.

    Attributes:
        found: the last answer, whose lease is the load's. None before and after the job waited.
        wait: state of the wait for promotions; None before the first answer.
    """

    ticket: LoadTicket
    groups: dict[int, tuple[tuple[bytes, ...], I64]]
    promotion: Climb
    epoch: int
    mark: object
    cancelled: bool = False
    started_at: float = 0.0
    found: LookupResult | None = None
    wait: PromotionWait | None = None


@dataclass(eq=False)
class LoadPart:
    """Copies of one group, at ``positions`` among the requested blocks."""

    kv_group: int
    positions: I64
    extents: Records
    copier: Copier
    ticket: Ticket
    done: Done | None = None


@dataclass(eq=False)
class LoadFlight:
    """A load whose copies are under way."""

    job: LoadJob
    found: LookupResult
    parts: list[LoadPart] = field(default_factory=list)
    reason: str = ""


def missed(ticket: LoadTicket, groups: KeysAndPages, reason: str) -> LoadDone:
    """Return the outcome of a load that brought nothing."""
    loaded = {g: np.zeros(len(keys), np.bool_) for g, (keys, _) in groups.items()}
    return LoadDone(ticket, 0, 0, loaded, str(reason))


def own_load(
    copier_pool: CopierPool, groups: KeysAndPages, blocks_max: int
) -> tuple[dict[int, tuple[tuple[bytes, ...], I64]], int, str]:
    """Return copies of a caller's arguments, their number of blocks, and the problem or ""."""
    own = {}
    problem = ""
    for kv_group, (keys, pages) in groups.items():
        names, numbers = tuple(keys), page_numbers(pages)
        problem = problem or copier_pool.key_problem(kv_group, names)
        if numbers is None or len(numbers) != len(names):
            problem = problem or str(Reason.BAD_EXTENTS)
        else:
            own[kv_group] = (names, numbers)
    blocks = sum(len(keys) for keys, _ in groups.values())
    if blocks > blocks_max:
        problem = problem or str(Reason.TOO_MANY_KEYS)
    return own, blocks, problem
