"""A part of ``lab/gpu/run.py`` that ends, fails or hangs as its last argument says.

``hang`` also starts a process, whose id it reports, and takes no notice of SIGTERM.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from gpu_parts.common import Report, run_part

from kvhearth_lab.bench.gpu.stage import Stage


def measure(report: Report, stage: Stage) -> None:
    """Behave as asked."""
    report.put(before=1)
    if BEHAVIOUR == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if BEHAVIOUR == "raise":
        raise ValueError("planted")
    if BEHAVIOUR == "hang":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
        time.sleep(0.4)
        report.put(pids=[os.getpid(), child.pid])
        time.sleep(600)


if __name__ == "__main__":
    BEHAVIOUR = sys.argv.pop()
    run_part(measure)
