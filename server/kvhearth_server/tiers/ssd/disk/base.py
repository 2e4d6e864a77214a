"""Protocol of a disk queue, common to all kernel interfaces."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple, Protocol

PIECES_MAX = 64
"""Most pieces of memory that one request gathers or scatters."""


class Op(enum.IntEnum):
    """Operation on a file."""

    READ = 0
    WRITE = 1
    SYNC = 2


class Request(NamedTuple):
    """One disk request.

    Attributes:
        op: ``SYNC`` flushes the file's data (as ``fdatasync``) and has no pieces.
        fd: an open file.
        offset: start of the request in the file, bytes.
        pieces: (address, bytes) of the memory, in file order; at most ``PIECES_MAX``.
        tag: the caller's number of the request, returned with its result.

    The caller keeps the memory mapped, and leaves it alone, until the request is reaped.
    """

    op: Op
    fd: int
    offset: int
    pieces: tuple[tuple[int, int], ...]
    tag: int


class Reaped(NamedTuple):
    """The end of a request: bytes moved (perhaps fewer than requested), or a negative errno."""

    tag: int
    result: int


class DiskQueue(Protocol):
    """At most ``depth`` requests in the kernel at once. Not thread-safe: one thread drives it.

    ``event_fd`` is readable once something can be reaped. The driver waits for it together with its
    other events, and ``reap`` resets it.
    """

    name: str
    depth: int
    event_fd: int

    @property
    def in_flight(self) -> int:
        """Number of requests taken and not yet reaped."""

    def submit(self, requests: Sequence[Request]) -> int:
        """Hand requests to the kernel, in order. Return how many of them were taken.

        Fewer are taken when ``depth`` is reached or the kernel lacks resources; submit the rest
        again after the next ``reap``. An error of a single request arrives as its result.

        Raises:
            OSError: the queue itself is broken.
        """

    def reap(self) -> list[Reaped]:
        """Return all requests that have ended since the last call; never waits."""

    def close(self) -> None:
        """Give the queue back to the kernel. Requests in flight still move their bytes."""
