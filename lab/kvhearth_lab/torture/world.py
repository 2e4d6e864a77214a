"""One world: an arena, a drive's directory, a daemon and clients, for faults and checks to act
on.
"""

from __future__ import annotations

import subprocess
import time

from kvhearth_lab.torture.clients import Clients
from kvhearth_lab.torture.plan import Plan
from kvhearth_lab.torture.report import CRASH, LOST, Report
from kvhearth_lab.torture.scene import Places
from kvhearth_lab.torture.stalls import Stalls, Window
from kvhearth_lab.torture.world_config import ROOMY


class UselessError(Exception):
    """The world cannot continue; the problem was reported."""


class World(Clients):
    """A crew with its daemon's starts and ends."""

    def __init__(self, plan: Plan, places: Places, report: Report, stalls: Stalls) -> None:
        super().__init__(plan, places, report, stalls)
        self._down: Window | None = None

    def launch_daemon(self, fault: str = "") -> None:
        """Start the daemon's process without waiting."""
        if self._down is None:
            self._down = self.stalls.open("daemon away")
        self.trust_drive()
        self.daemon.launch(fault)

    def start_daemon(self, fault: str = "") -> bool:
        """Start the daemon and wait until it accepts clients; False if an armed fault ended it
        before.

        Raises:
            UselessError: it does not come up.
        """
        self.launch_daemon(fault)
        if not self.daemon.wait_ready():
            status = self.daemon.exit_code
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
        """Send SIGKILL. Unless ``settled`` is False, excuse the blocks that were lost with its
        memory.
        """
        if self._down is None:
            self._down = self.stalls.open("daemon away")
        self.daemon.kill()
        if settled:
            self.settle_memory()

    def terminate_daemon(self) -> None:
        """Send SIGTERM; the daemon must end without an error."""
        self._down = self._down or self.stalls.open("daemon away")
        begin = time.monotonic()
        status: int | None = None
        try:
            status = self.daemon.terminate()
        except subprocess.TimeoutExpired:
            self.daemon.kill()
        took_s = time.monotonic() - begin
        if status != 0:
            text = f"SIGTERM: status {status} after {took_s:.1f} s: {self.daemon.complaints()}"
            self.report.find(CRASH, text, self.where)
        else:
            self._all_written()
        self.settle_memory()

    def _all_written(self) -> None:
        """Check after an orderly end that sealed blocks are on the drive, unless the drive was
        faulty.
        """
        if not self.shape.ssd_bytes or not self.oracle.keeps or self.drive_is_suspect:
            return
        if self.shape.kind == ROOMY and self.damaged:
            return  # damaged records have not been noticed yet: memory has all blocks
        for model, above in self.not_on_disk(sealed=True).items():
            if above:
                text = f"{model}: {len(above)} sealed blocks were not written at an orderly end"
                self.report.find(LOST, f"{text}, such as {above[:8]}", self.where, len(above))
                self.oracle.excuse(model, above, "lost")

    def settle_memory(self) -> None:
        """Excuse blocks that were only in memory after a daemon's end, if the arena's files do not
        remain.
        """
        if not self.shape.arena_stays:
            self.excuse_not_on_disk("memory ended")
