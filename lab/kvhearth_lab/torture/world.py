"""One world: an arena, a drive's directory, a daemon, clients; what faults and checks act on."""

from __future__ import annotations

import time

from kvhearth_lab.torture.clients import Crew
from kvhearth_lab.torture.plan import Plan
from kvhearth_lab.torture.report import CRASH, LOST, Report
from kvhearth_lab.torture.scene import Places
from kvhearth_lab.torture.stalls import Stalls, Window
from kvhearth_lab.torture.world_config import ROOMY


class UselessError(Exception):
    """The world cannot go on: what is wrong was reported."""


class World(Crew):
    """A crew with its daemon's lives and deaths."""

    def __init__(self, plan: Plan, places: Places, report: Report, stalls: Stalls) -> None:
        super().__init__(plan, places, report, stalls)
        self._down: Window | None = None

    def launch_daemon(self, fault: str = "") -> None:
        """Start its process and do not wait."""
        if self._down is None:
            self._down = self.stalls.open("daemon away")
        self.trust_drive()
        self.daemon.launch(fault)

    def start_daemon(self, fault: str = "") -> bool:
        """Start it and wait until it takes clients; false if an armed fault ended it before.

        Raises:
            UselessError: it does not come up.
        """
        self.launch_daemon(fault)
        if not self.daemon.wait_ready():
            status = self.daemon.wait_end(0.0)
            if fault and status == -9:
                return False
            how = "does not come up" if status is None else f"ended with {status} at its start"
            self.report.find(CRASH, f"the daemon {how}: {self.daemon.complaints()}", self.where)
            self.daemon.kill()
            raise UselessError
        if self._down is not None:
            self.stalls.close(self._down)
            self._down = None
        return True

    def kill_daemon(self, *, settled: bool = True) -> None:
        """kill -9. Unless not ``settled``, what ended with its memory is no longer expected."""
        if self._down is None:
            self._down = self.stalls.open("daemon away")
        self.daemon.kill()
        if settled:
            self.settle_memory()

    def terminate_daemon(self) -> None:
        """SIGTERM; it must end well."""
        self._down = self._down or self.stalls.open("daemon away")
        begin = time.monotonic()
        status = self.daemon.terminate()
        took_s = time.monotonic() - begin
        if status != 0:
            text = f"SIGTERM: status {status} after {took_s:.1f} s: {self.daemon.complaints()}"
            self.report.find(CRASH, text, self.where)
        else:
            self._all_written()
        self.settle_memory()

    def _all_written(self) -> None:
        """After an orderly end: what was sealed is on the drive, unless that was not well."""
        if not self.shape.ssd_bytes or not self.oracle.keeps or self.drive_is_suspect:
            return
        if self.shape.kind == ROOMY and self.damaged:
            return  # whose records are damaged, nobody has noted: memory has them all
        for model, above in self.not_on_disk(sealed=True).items():
            if above:
                text = f"{model}: {len(above)} sealed blocks were not written at an orderly end"
                self.report.find(LOST, f"{text}, such as {above[:8]}", self.where, len(above))
                self.oracle.excuse(model, above, "lost")

    def settle_memory(self) -> None:
        """After a daemon's end: without an arena's files, what is left is what is on the drive."""
        if not self.shape.arena_stays:
            self.excuse_not_on_disk("memory ended")
