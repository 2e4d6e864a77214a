"""Health of a directory: turns results of requests into "may be written to" and reasons. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvhearth_server.tiers.base import Kind

_PAUSE_FIRST_S = 1.0
_PAUSE_MAX_S = 60.0
_SLOW_KEEP_S = 30.0

UNUSABLE = "unusable"
"""Word for a directory that could not be opened at all."""

WORDS = frozenset(
    {
        *("buffered", "not_writable", "io", "no_space", "read_only", "short", "slow", "stuck"),
        *("capped", "passed_over", "no_descriptors", UNUSABLE),
    }
)
"""Every problem that a directory can have, as one word each."""

INTERFACE = "interface"
"""Word for a kernel queue or a thread that no longer drives any disk."""

_WORDS = {
    "no_space": "no space left on its file system",
    "read_only": "its file system is read-only",
    "io": "its device reports I/O errors",
    "short": "its device moves fewer bytes than asked for",
}


@dataclass
class DirectoryHealth:
    """State of one directory.

    A failed write stops writing for a pause that doubles each time; a success ends it. Reads are
    always tried: each is verified, and a miss costs little.
    """

    name: str
    stuck: int = 0
    _pause_s: float = 0.0
    _paused_until: float = 0.0
    _write_reason: str = ""
    _read_reason: str = ""
    _slow_until: float = 0.0
    _slowest_s: float = 0.0
    _no_room: tuple[str, str] = ("", "")
    _no_room_until: float = 0.0
    _notes: dict[str, str] = field(default_factory=dict)

    def note(self, word: str, message: str) -> None:
        """Record a permanent condition, such as a file system without direct I/O."""
        self._notes[word] = message

    def write_failed(self, reason: str, now: float) -> None:
        """Record that a write, or making room for one, failed."""
        if now >= self._paused_until:
            self._pause_s = min(_PAUSE_MAX_S, max(_PAUSE_FIRST_S, 2 * self._pause_s))
            self._paused_until = now + self._pause_s
        self._write_reason = reason

    def write_done(self) -> None:
        """Record that a write succeeded."""
        self._pause_s = self._paused_until = 0.0
        self._write_reason = ""

    def read_failed(self, reason: str) -> None:
        """Record that a read failed."""
        self._read_reason = reason

    def read_done(self) -> None:
        """Record that a read succeeded."""
        self._read_reason = ""

    def no_room(self, until: float, word: str, message: str) -> None:
        """Record that no other segment can be made for now, although no write failed. The log tries
        again at ``until``.
        """
        self._no_room, self._no_room_until = (word, message), until

    def slow(self, took_s: float, now: float) -> None:
        """Record a request that took longer than it should."""
        self._slow_until = now + _SLOW_KEEP_S
        self._slowest_s = took_s

    def may_write(self, now: float) -> bool:
        """Whether new records may go here."""
        return not self.stuck and now >= self._paused_until

    def retry_after_s(self, now: float) -> float:
        """Return the seconds until ``may_write`` may be true again, as far as is known."""
        return max(0.0, self._paused_until - now)

    def by_kind(self, now: float) -> dict[Kind, str]:
        """Return all current problems: one sentence for people for each kind."""
        found = {(word, ""): message for word, message in self._notes.items()}
        for reason, doing in ((self._write_reason, "writes"), (self._read_reason, "reads")):
            if reason:
                word = reason if reason in WORDS else "io"
                found[word, doing] = f"{doing}: {_WORDS.get(reason, reason)}"
        if self.stuck:
            found["stuck", "requests"] = f"its device holds on to {self.stuck} requests"
        if now < self._no_room_until:
            word, message = self._no_room
            found[word, "segments"] = message
        if now < self._slow_until:
            message = f"its device is slow: a request took {self._slowest_s:.1f} s"
            found["slow", "requests"] = message
        return {
            Kind(self.name, *kind): f"{self.name}: {message}" for kind, message in found.items()
        }

    def findings(self, now: float) -> list[tuple[str, str]]:
        """Return all current problems as pairs of a word of ``WORDS`` and a sentence."""
        return [(kind.word, message) for kind, message in self.by_kind(now).items()]
