"""Fault points: places at which a test may kill this process for real.

``KVHEARTH_FAULT=commit.after_journal:3`` makes the third passage through that point end the process
with SIGKILL, so no handler, ``finally`` or flush runs, just as after a crash. Unarmed, a passage
costs one comparison with ``None``.
"""

from __future__ import annotations

import os
import signal

ENVIRONMENT_NAME = "KVHEARTH_FAULT"
DISK_ENVIRONMENT_NAME = "KVHEARTH_DISK_FAULTS"
"""Names the file that says how the daemon's drives misbehave (``tiers/ssd/disk/commanded``)."""


def _parse(text: str | None) -> tuple[str, int] | None:
    if not text:
        return None
    name, _, count = text.partition(":")
    return name, int(count or "1")


_armed: tuple[str, int] | None = _parse(os.environ.get(ENVIRONMENT_NAME))


def arm(text: str | None) -> None:
    """Arm ``point:count`` in this process, or disarm with ``None``."""
    global _armed
    _armed = _parse(text)


def hit(name: str) -> None:
    """Pass the fault point ``name``; does not return if it is armed and its count is reached."""
    global _armed
    if _armed is None or _armed[0] != name:
        return
    if _armed[1] > 1:
        _armed = (name, _armed[1] - 1)
        return
    os.kill(os.getpid(), signal.SIGKILL)
