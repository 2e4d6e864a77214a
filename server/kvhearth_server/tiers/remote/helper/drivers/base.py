"""Interface of a driver: named values at a remote, by its client library.

All methods are coroutines of one loop. Each returns by its deadline if the library can; the daemon
ends the process where it does not. Outcomes are values: a driver translates its library's errors.
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
        parallel: values that are put or got at once.
        requests: requests that were sent, by kind: put, get, head, delete, list.
    """

    caps: Caps
    parallel: int
    requests: Counter[str]

    def attach(self, staging: memoryview) -> None:
        """Learn the memory that values are put from and got into; called once, before all else."""

    async def put(
        self, name: str, value: memoryview, deadline: float, *, replace: bool = False
    ) -> Outcome:
        """Store a value; ``Done`` also if the name has one, which stays unless ``replace`` is true.

        Args:
            deadline: ``time.monotonic()`` by which it ends.
        """

    def portion(self, size: int) -> int:
        """Return the number of values of ``size`` bytes that one call of ``get`` should take."""

    async def get(
        self, names: Sequence[str], into: Sequence[memoryview], deadline: float
    ) -> list[memoryview | Outcome]:
        """Return values, in ``into`` or in memory of the library's; an outcome for each that it
        does not have.

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


TIMEOUT: Outcome = Failed(Failure.TIMEOUT)
UNREACHABLE: Outcome = Failed(Failure.UNREACHABLE)
DENIED: Outcome = Failed(Failure.DENIED)
