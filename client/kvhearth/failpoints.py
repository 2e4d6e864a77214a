"""Fault points: places at which a test may kill or stop this process for real.

``KVHEARTH_FAULT=commit.after_journal:3`` makes the third passage through that point end the process
with SIGKILL, so no handler, ``finally`` or flush runs, just as after a crash. With ``:stop`` at the
end SIGSTOP stops the process there, and SIGCONT lets it continue. Unarmed, a passage costs one
comparison with ``None``.
"""

from __future__ import annotations

import os
import signal
import threading

ENVIRONMENT_NAME = "KVHEARTH_FAULT"
DISK_ENVIRONMENT_NAME = "KVHEARTH_DISK_FAULTS"
"""Names the file that defines the faults of the daemon's drives
(``kvhearth_lab.harness.faults``).
"""


def _parse(text: str | None) -> tuple[str, int, bool] | None:
    if not text:
        return None
    name, count, how, *_ = [*text.split(":"), "", ""]
    return name, int(count or "1"), how == "stop"


_armed: tuple[str, int, bool] | None = _parse(os.environ.get(ENVIRONMENT_NAME))


def arm(text: str | None) -> None:
    """Arm ``point:count`` or ``point:count:stop`` in this process, or disarm with ``None``."""
    global _armed
    _armed = _parse(text)


def hit(name: str) -> None:
    """Pass the fault point ``name``; an armed point whose count is reached kills or stops here.

    A stopped process returns from here after SIGCONT.
    """
    global _armed
    if _armed is None or _armed[0] != name:
        return
    _, count, stop = _armed
    if count > 1:
        _armed = (name, count - 1, stop)
        return
    if stop:
        _armed = None
        # Sent to this thread: another one would stop only after this one has passed the point.
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
        return
    os.kill(os.getpid(), signal.SIGKILL)
