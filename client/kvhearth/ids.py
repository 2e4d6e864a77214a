"""Ids that a client chooses: random, so that nobody else's are met."""

from __future__ import annotations

import secrets
import struct

_AT_ONCE = struct.Struct("<64Q")
"""The kernel is asked for so many at a time."""


class Ids:
    """A source of ids. Thread-safe; a forked child makes one of its own."""

    def __init__(self) -> None:
        self._drawn: list[int] = []

    def draw(self) -> int:
        """Random, not 0, and below 2^63 - 1, so that it fits a signed integer everywhere."""
        try:
            return self._drawn.pop()
        except IndexError:
            # Two threads may come here at once: the ids of one of them are then never used.
            numbers = _AT_ONCE.unpack(secrets.token_bytes(_AT_ONCE.size))
            drawn: list[int] = [(number >> 2) + 1 for number in numbers]
            self._drawn = drawn
            return drawn.pop()
