"""What a queue of disk requests promises, whichever kernel interface is behind it."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple, Protocol

PIECES_MAX = 64
"""Most pieces of memory that one request gathers or scatters."""


class Op(enum.IntEnum):
    """What to do with the file."""

    READ = 0
    WRITE = 1
    SYNC = 2


class Request(NamedTuple):
    """One disk request.

    Attributes:
        op: ``SYNC`` flushes the file's data (as ``fdatasync``) and has no pieces.
        fd: an open file.
        offset: where it begins in the file, bytes.
        pieces: (address, bytes) of the memory, in file order; at most ``PIECES_MAX``.
        tag: the caller's number of it, given back with its result.

    The caller keeps the memory mapped, and leaves it alone, until the request is reaped.
    """

    op: Op
    fd: int
    offset: int
    pieces: tuple[tuple[int, int], ...]
    tag: int


class Reaped(NamedTuple):
    """The end of a request: bytes moved (it may be fewer than asked for), or minus an errno."""

    tag: int
    result: int


class DiskQueue(Protocol):
    """At most ``depth`` requests in the kernel at once. Not thread-safe: one thread drives it.

    ``event_fd`` is readable once something can be reaped; the driver waits for it together with
    whatever else wakes it, and ``reap`` resets it.
    """

    name: str
    depth: int
    event_fd: int

    @property
    def in_flight(self) -> int:
        """Requests taken and not yet reaped."""

    def submit(self, requests: Sequence[Request]) -> int:
        """Hand requests to the kernel, in order; how many of them were taken.

        Fewer are taken when ``depth`` is reached or the kernel is short of something; offer the
        rest again after the next ``reap``. What is wrong with a single request comes as its
        result.

        Raises:
            OSError: the queue itself is broken.
        """

    def reap(self) -> list[Reaped]:
        """All requests that have ended since the last call; never waits."""

    def close(self) -> None:
        """Give the queue back to the kernel. What is still in flight goes on into its memory."""
