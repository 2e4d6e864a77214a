"""Start of a process that the daemon or a gateway's parent starts and watches.

Its first line of stdin has its settings as JSON; the end of stdin ends it. It never outlives its
parent.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

_PR_SET_PDEATHSIG = 1


def begin() -> dict[str, Any] | None:
    """Read the settings; return None if the parent has died.

    What the child inherited (listening sockets, the arena) would be kept from the next parent by
    a stopped or busy orphan: the kernel ends it with the thread that started it.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    line = sys.stdin.buffer.readline()
    if not line.endswith(b"\n"):
        return None
    message: dict[str, Any] = json.loads(line)
    return message


def watch_parent(ended: Callable[[], None]) -> None:
    """Call ``ended`` in a thread once the parent has closed our stdin or died."""

    def watch() -> None:
        while os.read(0, 4096):
            pass
        ended()

    threading.Thread(target=watch, name="kvhearth-parent", daemon=True).start()
