"""How a directory is doing: from results of requests to "may be written to" and reasons. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

_PAUSE_FIRST_S = 1.0
_PAUSE_MAX_S = 60.0
_SLOW_KEEP_S = 30.0

UNUSABLE = "unusable"
"""The word for a directory that could not be opened at all."""

WORDS = frozenset(
    {
        *("buffered", "not_writable", "io", "no_space", "read_only", "short", "slow", "stuck"),
        UNUSABLE,
    }
)
"""Everything that can be wrong with a directory, in a word each."""

_WORDS = {
    "no_space": "no space left on its file system",
    "read_only": "its file system is read-only",
    "io": "its device reports I/O errors",
    "short": "its device moves fewer bytes than asked for",
}


@dataclass
class DirectoryHealth:
    """One directory's state.

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
    _no_room_until: float = 0.0
    _notes: dict[str, str] = field(default_factory=dict)

    def note(self, word: str, told: str) -> None:
        """Something that holds for good, such as: no direct I/O here."""
        self._notes[word] = told

    def write_failed(self, reason: str, now: float) -> None:
        """A write, or making room for one, failed."""
        if now >= self._paused_until:
            self._pause_s = min(_PAUSE_MAX_S, max(_PAUSE_FIRST_S, 2 * self._pause_s))
            self._paused_until = now + self._pause_s
        self._write_reason = reason

    def write_done(self) -> None:
        """A write succeeded."""
        self._pause_s = self._paused_until = 0.0
        self._write_reason = ""

    def read_failed(self, reason: str) -> None:
        """A read failed."""
        self._read_reason = reason

    def read_done(self) -> None:
        """A read succeeded."""
        self._read_reason = ""

    def no_room(self, until: float) -> None:
        """Its file system has no space for another segment; asked again at ``until``."""
        self._no_room_until = until

    def slow(self, took_s: float, now: float) -> None:
        """A request took longer than it should."""
        self._slow_until = now + _SLOW_KEEP_S
        self._slowest_s = took_s

    def may_write(self, now: float) -> bool:
        """Whether new records may go here."""
        return not self.stuck and now >= self._paused_until

    def retry_after_s(self, now: float) -> float:
        """When ``may_write`` may be true again, as far as is known."""
        return max(0.0, self._paused_until - now)

    def findings(self, now: float) -> list[tuple[str, str]]:
        """Everything that is not as it should be: one of ``WORDS``, and a sentence for people."""
        found = list(self._notes.items())
        for reason, doing in ((self._write_reason, "writes"), (self._read_reason, "reads")):
            if reason:
                word = reason if reason in WORDS else "io"
                found.append((word, f"{doing}: {_WORDS.get(reason, reason)}"))
        if self.stuck:
            found.append(("stuck", f"its device holds on to {self.stuck} requests"))
        if now < self._no_room_until:
            found.append(("no_space", "no space left on its file system for another segment"))
        if now < self._slow_until:
            found.append(("slow", f"its device is slow: a request took {self._slowest_s:.1f} s"))
        return [(word, f"{self.name}: {told}") for word, told in found]

    def reasons(self, now: float) -> list[str]:
        """The same for people alone."""
        return [told for _, told in self.findings(now)]
