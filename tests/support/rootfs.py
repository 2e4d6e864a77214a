"""The daemon in a root directory of its own, as an unprivileged user in namespaces of its own."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvhearth_lab.harness import HUNG_S
from support.daemon import until

ROOTFS = Path(__file__).resolve().parents[2] / "deploy/docker/rootfs.py"
OVERFLOW_UID = 65534
"""Apparent id of a user whose id the daemon's user namespace does not map."""

_ENTER = """
set -eu
root=$1 uid=$2 gid=$3 sockets=$4 arena=$5
shift 5
mount --bind "$root" "$root"
mount -t tmpfs -o size=1m,mode=0755 tmpfs "$root/dev"
for name in null zero urandom; do
  touch "$root/dev/$name"
  mount --bind "/dev/$name" "$root/dev/$name"
done
mount --bind "$sockets" "$root/run/kvhearth"
mount --bind "$arena" "$root/arena"
mount -t proc -o nosuid,nodev,noexec proc "$root/proc"
mount -o remount,bind,ro "$root"
exec unshare --user --map-user="$uid" --map-group="$gid" --root="$root" --wd=/ -- "$@"
"""
"""Script in the outer namespaces: shares two directories, makes the rest read-only, gives up
root.
"""


def build_root(place: Path, *extras: str) -> Path:
    """Run rootfs.py; skip the test where packages are not available."""
    words = [sys.executable, str(ROOTFS), str(place), *extras]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode and "No matching distribution" in done.stderr:
        pytest.skip(f"the packages cannot be had here: {done.stderr[-300:]}")
    assert done.returncode == 0, done.stderr[-3000:]
    return place


class Jail:
    """One root with its sockets' and arena's directories, and the daemon's process.

    Args:
        root: output of rootfs.py.
        sockets, arena: outside directories for /run/kvhearth and /arena.
    """

    def __init__(self, root: Path, sockets: Path, arena: Path) -> None:
        self.root, self.sockets, self.arena = root, sockets, arena
        self.config: dict[str, Any] = json.loads(root.with_suffix(".json").read_text())
        self.process: subprocess.Popen[bytes] | None = None
        if os.geteuid() == 0:
            for folder in (sockets, arena):
                os.chown(folder, *self._ids)

    @property
    def _ids(self) -> tuple[int, int]:
        uid, _, gid = str(self.config["user"]).partition(":")
        return int(uid), int(gid)

    def command(self, *words: str) -> list[str]:
        """Return the command that runs ``words`` inside."""
        enter = ["--user", "--map-root-user", "--mount", "--pid", "--fork", "--kill-child"]
        ids = [str(number) for number in self._ids]
        place = [str(self.root), *ids, str(self.sockets), str(self.arena)]
        return ["unshare", *enter, "sh", "-c", _ENTER, "enter", *place, *words]

    def _privileges(self) -> dict[str, Any]:
        """Return process options that drop root: if started as root, the outside process becomes
        the image's user first.
        """
        if os.geteuid() != 0:
            return {}
        uid, gid = self._ids
        return {"user": uid, "group": gid, "extra_groups": []}

    def _environment(self) -> dict[str, str]:
        tools = {"PATH": os.environ["PATH"]}
        return tools | {n: v for n, v in self.config["environment"].items() if n != "PATH"}

    def _inside(self, *words: str) -> list[str]:
        path = str(self.config["environment"]["PATH"]).split(":")[0]
        return self.command(f"{path}/{words[0]}", *words[1:])

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a program of the image to its end, in namespaces of its own."""
        return subprocess.run(
            self._inside(*words),
            env=self._environment(),
            capture_output=True,
            text=True,
            timeout=HUNG_S,
            check=False,
            **self._privileges(),
        )

    def start(self, *flags: str) -> None:
        """Start the image's command and wait until it listens."""
        words = [*self.config["entrypoint"], *self.config["command"], *flags]
        log = (self.root.parent / "log").open("ab")
        with log:
            self.process = subprocess.Popen(
                self._inside(*words),
                env=self._environment(),
                stdout=log,
                stderr=log,
                cwd="/",
                **self._privileges(),
            )
        until(self._up_or_dead, "the daemon in the root comes up", 30)
        assert self.process.poll() is None, self.log()

    def _up_or_dead(self) -> bool:
        assert self.process is not None
        return self.process.poll() is not None or '"ready"' in self.log()

    def log(self) -> str:
        """Return the daemon's output since it was last killed."""
        return (self.root.parent / "log").read_text(errors="replace")

    @property
    def daemon_pid(self) -> int:
        """Process id of the daemon outside; inside it is 1."""
        assert self.process is not None
        task = f"/proc/{self.process.pid}/task/{self.process.pid}/children"
        (child,) = Path(task).read_text().split()
        return int(child)

    def kill(self) -> None:
        """Kill the daemon with SIGKILL; its namespaces go with it."""
        if self.process is None or self.process.poll() is not None:
            return
        with contextlib.suppress(ProcessLookupError, ValueError):
            os.kill(self.daemon_pid, signal.SIGKILL)
        try:
            self.process.wait(HUNG_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        (self.root.parent / "log").write_text("")


@contextlib.contextmanager
def jail(root: Path, folder: Path, arena: Path) -> Iterator[Jail]:
    """Yield a jail whose daemon is gone at the end; skip where namespaces are not available."""
    if shutil.which("unshare") is None:
        pytest.skip("needs unshare (util-linux)")
    sockets = folder / "s"
    sockets.mkdir(mode=0o755)
    folder.chmod(0o755)
    made = Jail(root, sockets, arena)
    probe = made.run("kvhearth", "--version")
    if probe.returncode and "unshare" in probe.stderr + probe.stdout:
        pytest.skip(f"user namespaces are not permitted here: {probe.stderr.strip()}")
    if probe.returncode and "mount" in probe.stderr:
        pytest.skip(f"mounts in a user namespace are not permitted here: {probe.stderr.strip()}")
    assert probe.returncode == 0, probe.stderr
    try:
        yield made
    finally:
        made.kill()
