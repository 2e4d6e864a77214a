"""Interface of a driver: named values at a remote, by its client library.

``put`` and ``get`` block, and several threads call them at once: a coroutine for each value cost
more than the library's own work. The others are coroutines of one loop. Each returns by its
deadline if the library can; the daemon ends the process where it does not. Outcomes are values: a
driver translates its library's errors.
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from typing import NamedTuple

from kvhearth_server.observability.logs import LimitedLog, Throttle, get_logger
from kvhearth_server.tiers.base import Failed, Failure, Outcome
from kvhearth_server.tiers.remote.url import RemoteUrl


class Listed(NamedTuple):
    """A value that a remote lists: its name, its size in bytes, its time in Unix seconds."""

    name: str
    size: int
    modified_s: float


class Refused(Exception):
    """The remote refuses this daemon, whatever is asked: the text says what to do."""


class Driver(ABC):
    """Values of one remote. Names do not have the prefix of the remote's URL.

    Attributes:
        value_bytes_max: most bytes of one value.
        parallel: threads that put, and as many that get, at once.
        portion_bytes, portion_max: most bytes and most values that one call should take.
        prefix: begin of each name at the remote.
        requests: requests that were sent, by kind: put, get, head, delete, list.
    """

    value_bytes_max: int
    parallel: int
    portion_bytes = 2 << 20
    portion_max = 16

    def __init__(self, url: RemoteUrl) -> None:
        self.url = url
        self.prefix = f"{url.prefix}/" if url.prefix else ""
        self.requests: Counter[str] = Counter()
        self._files = tuple(filter(None, (url.secret_file, url.ca, url.cert, url.key)))
        self.reopen()

    def reopen(self) -> None:
        """Read the files that the URL names, and make connections anew for requests to come.

        Raises:
            Refused: the remote cannot be opened as the URL and these files say.
        """
        self._opened_with = self._versions()
        self._reopen()

    def files_changed(self) -> bool:
        """Whether the files that the URL names are others than those that were read."""
        return self._versions() != self._opened_with

    def _versions(self) -> list[tuple[int, int, int] | None]:
        found = list[tuple[int, int, int] | None]()
        for path in self._files:
            try:
                now = os.stat(path)
                found.append((now.st_ino, now.st_size, now.st_mtime_ns))
            except OSError:
                found.append(None)
        return found

    def _reopen(self) -> None:  # noqa: B027 - not all have secrets
        """Do what ``reopen`` says."""

    def attach(self, staging: memoryview) -> None:  # noqa: B027 - not all need it
        """Learn the memory that values are put from and got into; called once, before all else."""

    def portion(self, size: int) -> int:
        """Return the number of values of ``size`` bytes that one call should take at most."""
        return max(1, min(round(self.portion_bytes / size), self.portion_max))

    @abstractmethod
    def put(
        self, names: Sequence[str], values: Sequence[memoryview], deadline: float
    ) -> list[Outcome]:
        """Store values; one that a name has is replaced.

        Args:
            deadline: ``time.monotonic()`` by which it ends.
        """

    @abstractmethod
    def get(
        self, names: Sequence[str], into: Sequence[memoryview], deadline: float
    ) -> list[memoryview | Outcome]:
        """Return values, in ``into`` or in memory of the library's; an outcome for each that it
        does not have. What follows a miss may be ``Missing``, too.

        Args:
            into: memory of the expected size for each. A value of another size is ``Corrupt``, or
                returned as it is.
        """

    @abstractmethod
    async def exists(self, names: Sequence[str], size: int, deadline: float) -> list[Outcome]:
        """Return ``Done`` or ``Missing`` for each name; ``Corrupt`` for values of another size than
        ``size``, if the remote tells sizes.
        """

    @abstractmethod
    async def delete(self, names: Sequence[str], deadline: float) -> list[Outcome]:
        """Remove values; ``Done`` also for names without one."""

    @abstractmethod
    def list(self, prefix: str) -> AsyncIterator[list[Listed]]:
        """Return all values whose name begins with ``prefix``, in portions."""

    async def close(self) -> None:  # noqa: B027 - not all need it
        """Give up connections."""


_QUIET_S = 10.0
_failures = LimitedLog(get_logger("kvhearth.remote"), Throttle(_QUIET_S))


def told(outcome: Outcome, error: BaseException) -> Outcome:
    """Log a library's error, which its outcome does not tell, if that is a failure: one line of a
    kind in ten seconds. Return the outcome.
    """
    if isinstance(outcome, Failed):
        reason = outcome.reason.value
        _failures.warning(
            "remote.request_failed", kind=reason, reason=reason, error=first_line(error)
        )
    return outcome


def first_line(error: BaseException) -> str:
    """Return an error's first line, without the library's debug text behind it."""
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__


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
