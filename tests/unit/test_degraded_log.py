"""Faults of the SSD tier are logged when they begin and when they end, not in between."""

from __future__ import annotations

from structlog.testing import CapturingLogger

from kvhearth_server.engine.tiering.manager import DegradedLog
from kvhearth_server.tiers.base import Kind
from kvhearth_server.tiers.figures import PROBLEMS
from kvhearth_server.tiers.ssd.directory import DirectoryHealth

IO = Kind("/a", "io", "writes")


class Rig:
    """A log of the faults that a test reports, on a clock that only the test moves."""

    def __init__(self) -> None:
        self.now = 100.0
        self.wrong: dict[Kind, str] = {}
        self.looks = 0
        self._out = CapturingLogger()
        self._log = DegradedLog(self._found, self._out, lambda: self.now)

    def _found(self) -> dict[Kind, str]:
        self.looks += 1
        return self.wrong

    def after(self, seconds: float) -> list[tuple[str, str, str]]:
        """Looks ten times a second; returns level, directory and reason of each line."""
        for _ in range(round(seconds * 10)):
            self.now += 0.1
            self._log.look()
        lines, self._out.calls = self._out.calls, []
        return [(c.method_name, c.kwargs["directory"], c.kwargs["reason"]) for c in lines]


def test_each_directory_and_each_kind_has_its_own_lines() -> None:
    rig = Rig()
    rig.wrong = {IO: "one", IO._replace(directory="/b"): "two", IO._replace(about="reads"): "three"}
    assert [reason for _, _, reason in rig.after(1)] == ["one", "two", "three"]
    del rig.wrong[IO]
    assert rig.after(20) == [("info", "/a", "one")]


def test_kinds_of_a_directory_stay_as_numbers_change() -> None:
    health = DirectoryHealth("/a")
    health.note("buffered", "no direct I/O")
    kinds = []
    for number in range(1, 4):
        health.stuck = number
        health.slow(number, now=0.0)
        health.no_room(1e9, "no_space", "no space left on its file system")
        health.write_failed("no_space", now=0.0)
        health.read_failed("no_space")
        kinds.append(health.problems(1.0))
    assert [*kinds[0]] == [*kinds[1]] == [*kinds[2]]
    assert kinds[0] != kinds[2]
    assert len(kinds[0]) == 6, "no two of them are taken for one"
    assert {(kind.directory, kind.word in PROBLEMS) for kind in kinds[0]} == {("/a", True)}
