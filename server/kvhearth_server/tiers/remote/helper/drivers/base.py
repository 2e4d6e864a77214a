"""Interface of a driver: named values at a remote, by its client library.

``put`` and ``get`` block, and several threads call them at once: a coroutine for each value cost
more than the library's own work. The others are coroutines of one loop. Each returns by its
deadline if the library can; the daemon ends the process where it does not. Outcomes are values: a
driver translates its library's errors.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from typing import NamedTuple, Protocol

from kvhearth_server.observability.logs import get_logger
from kvhearth_server.tiers.base import Failed, Failure, Outcome
from kvhearth_server.tiers.remote.mover import Caps


class Listed(NamedTuple):
    """A value that a remote lists: its name, its size in bytes, its time in Unix seconds."""

    name: str
    size: int
    modified_s: float


class Refused(Exception):
    """The remote refuses this daemon, whatever is asked: the text says what to do."""


class Driver(Protocol):
    """Values of one remote. Names do not have the prefix of the remote's URL.

    Attributes:
        caps: properties of the remote.
        parallel: threads that put, and as many that get, at once.
        requests: requests that were sent, by kind: put, get, head, delete, list.
    """

    caps: Caps
    parallel: int
    requests: Counter[str]

    def attach(self, staging: memoryview) -> None:
        """Learn the memory that values are put from and got into; called once, before all else."""

    def portion(self, size: int) -> int:
        """Return the number of values of ``size`` bytes that one call should take at most."""

    def put(
        self,
        names: Sequence[str],
        values: Sequence[memoryview],
        deadline: float,
        *,
        replace: bool = False,
    ) -> list[Outcome]:
        """Store values; ``Done`` also if a name has one, which stays unless ``replace`` is true.

        Args:
            deadline: ``time.monotonic()`` by which it ends.
        """

    def get(
        self, names: Sequence[str], into: Sequence[memoryview], deadline: float
    ) -> list[memoryview | Outcome]:
        """Return values, in ``into`` or in memory of the library's; an outcome for each that it
        does not have. What follows a miss may be ``Missing``, too.

        Args:
            into: memory of the expected size for each. A value of another size is ``Corrupt``, or
                returned as it is.
        """

    async def exists(self, names: Sequence[str], size: int, deadline: float) -> list[Outcome]:
        """Return ``Done`` or ``Missing`` for each name; values of another size than ``size`` may
        count as missing.
        """

    async def delete(self, names: Sequence[str], deadline: float) -> list[Outcome]:
        """Remove values; ``Done`` also for names without one."""

    def list(self, prefix: str) -> AsyncIterator[list[Listed]]:
        """Return all values whose name begins with ``prefix``, in portions."""

    async def close(self) -> None:
        """Give up connections."""


_QUIET_S = 10.0
_log = get_logger("kvhearth.remote")


class Complaints:
    """Log of a library's errors, which outcomes do not tell: one line of a kind in ten seconds."""

    def __init__(self) -> None:
        self._told: dict[str, float] = {}

    def tell(self, outcome: Outcome, error: BaseException) -> Outcome:
        """Log an error whose outcome is a failure; return the outcome."""
        now = time.monotonic()
        if isinstance(outcome, Failed):
            kind = outcome.reason.value
            if now - self._told.get(kind, -_QUIET_S) >= _QUIET_S:
                self._told[kind] = now
                lines = str(error).strip().splitlines() or [type(error).__name__]
                _log.warning("remote.request_failed", reason=kind, error=lines[0][:300])
        return outcome


_TIMES_S = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
_LATE_S = 0.15
"""Lateness that the daemon still allows: it has told the caller, and waits for the helper."""


def time_class(deadline: float) -> float:
    """Return one of a few times in seconds that end by the deadline, or little later.

    The libraries' clients have one deadline for all their requests, and so there is a client for
    each time.
    """
    left_s = deadline - time.monotonic() + _LATE_S
    return max((each for each in _TIMES_S if each <= left_s), default=_TIMES_S[0])


TIMEOUT: Outcome = Failed(Failure.TIMEOUT)
UNREACHABLE: Outcome = Failed(Failure.UNREACHABLE)
DENIED: Outcome = Failed(Failure.DENIED)
