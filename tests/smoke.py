"""The built wheel in an empty environment, as users install it: serve, store, kill -9, load.

Usage: ``python tests/smoke.py``, by an interpreter that has hatchling.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "deploy/examples/quickstart/store_and_load.py"
LOCK = ROOT / "deploy/docker/requirements.lock"
STEP_S = 1800
"""A step this long has hung."""


def run(*words: object) -> str:
    """Run a command and return what it printed; a failure ends the program."""
    done = subprocess.run(
        [str(word) for word in words],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        timeout=STEP_S,
        check=False,
    )
    if done.returncode:
        sys.exit(f"smoke: exit code {done.returncode}: {' '.join(map(str, words))}\n{done.stdout}")
    return done.stdout


def install(folder: Path) -> Path:
    """Build the wheel, install it with the image's locked packages, and return its ``bin``."""
    pip = (sys.executable, "-m", "pip", "-q", "--disable-pip-version-check")
    run(*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, ROOT)
    (wheel,) = folder.glob("kvhearth-*.whl")
    run(sys.executable, "-m", "venv", "--without-pip", folder / "environment")
    binaries = folder / "environment" / "bin"
    into = (*pip, "--python", binaries / "python", "install", "--no-deps")
    run(*into, "--require-hashes", "-r", LOCK)
    run(*into, "--no-index", wheel)
    run(*pip, "--python", binaries / "python", "check")
    return binaries


def serve(binaries: Path, sockets: Path, arena: Path) -> subprocess.Popen[bytes]:
    """Start the daemon and wait until it serves."""
    place = ("--socket-dir", str(sockets), "--arena-dir", str(arena))
    small = ("--memory", "16MiB", "--slab-bytes", "2MiB")  # docker gives 64 MiB of shared memory
    quiet = ("--http", "off", "--log-level", "warning")
    daemon = subprocess.Popen([str(binaries / "kvhearth"), "serve", *place, *small, *quiet])
    run(binaries / "kvhearth", "health", "--socket-dir", sockets, "--wait", STEP_S)
    return daemon


def main() -> None:
    """Run all steps; the first one that fails ends the program."""
    folder = Path(tempfile.mkdtemp(prefix="kvh-smoke-"))
    arena = Path(tempfile.mkdtemp(prefix="kvh-smoke-", dir="/dev/shm"))
    daemon = None
    try:
        binaries = install(folder)
        sockets = folder / "sockets"
        for there in (0, 8):
            daemon = serve(binaries, sockets, arena)
            told = run(binaries / "python", EXAMPLE, f"kvhearth+unix://{sockets}")
            for line in (f"{there} of 8 blocks were there", "128 tokens need no prefill"):
                if line not in told:
                    sys.exit(f"smoke: expected {line!r}:\n{told}")
            daemon.kill()
            daemon.wait(STEP_S)
    finally:
        if daemon is not None:
            daemon.kill()
        shutil.rmtree(folder)
        shutil.rmtree(arena)
    print("smoke: 8 blocks stored, daemon killed, 8 blocks loaded")


if __name__ == "__main__":
    os.environ.pop("PYTHONPATH", None)
    main()
