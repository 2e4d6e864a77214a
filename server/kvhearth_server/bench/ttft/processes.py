"""A process and all that it starts: their log, their processor time, their end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

_END_S = 30.0
_KILL_S = 15.0
_SESSION_FIELD = 3
"""Of /proc/PID/stat, counted from behind the name."""


def parse_session(stat: str) -> int | None:
    """The session of ``/proc/PID/stat``, None for a process that has ended and only waits to be
    reaped. A process may have any name, brackets included.
    """
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[_SESSION_FIELD])


def session_pids(session: int) -> list[int]:
    """All processes of a session that live."""
    found = []
    for path in Path("/proc").iterdir():
        if not path.name.isdecimal():
            continue
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if parse_session((path / "stat").read_text()) == session:
                found.append(int(path.name))
    return found


def cpu_s(pids: Sequence[int]) -> float:
    """Processor time of all threads that live."""
    nanoseconds = 0
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for task in Path(f"/proc/{pid}/task").iterdir():
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                    nanoseconds += int((task / "schedstat").read_text().split()[0])
    return nanoseconds / 1e9


class Family:
    """A process in a session of its own, so that all of it is found and ended.

    Args:
        log_path: for its output.
        command, environment: as for Popen.
    """

    def __init__(
        self, log_path: Path, command: Sequence[str], environment: Mapping[str, str]
    ) -> None:
        self._log_path = log_path
        with log_path.open("wb") as log:
            self._process = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=dict(environment),
                start_new_session=True,
            )

    @property
    def ended(self) -> int | None:
        """Exit code of the first process, None while it runs."""
        return self._process.poll()

    def cpu_s(self) -> float:
        """Processor time of all its threads that live."""
        return cpu_s(session_pids(self._process.pid))

    def said(self) -> str:
        """Its output."""
        return self._log_path.read_text(errors="replace")

    def end(self) -> None:
        """Stop it; kill what is left after a while."""
        if self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(_KILL_S)
        until = time.monotonic() + _KILL_S
        while session_pids(self._process.pid) and time.monotonic() < until:
            time.sleep(0.02)
