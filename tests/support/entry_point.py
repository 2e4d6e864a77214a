"""The command in a process of its own, after statements that prepare it."""

from __future__ import annotations

import os
import subprocess
import sys

from kvhearth_lab.harness import HUNG_S


def kvhearth(*words: str, prelude: str = "", **environ: str) -> subprocess.CompletedProcess[str]:
    """Runs the entry point after the statements of ``prelude``, without settings of ours in the
    environment but ``environ``.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KVHEARTH_")}
    kept |= {"PYTHONPATH": os.pathsep.join(sys.path), "COLUMNS": "120", "NO_COLOR": "1"}
    code = f"import sys\n{prelude}\nfrom kvhearth_server.cli import app\napp.main()"
    return subprocess.run(
        [sys.executable, "-c", code, *words],
        capture_output=True,
        text=True,
        timeout=HUNG_S,
        env=kept | environ,
        check=False,
    )
