"""Runs the commands of documents as a reader would: one shell a page, the real ``kvhearth``.

A page is one bash script: its ``sh`` blocks in their order. Programs that would change the machine
or need a network are replaced by checks of their arguments (``CHECKED``). A block below a comment
``<!-- not run: REASON -->`` is left out.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from support.daemon import free_port

ROOT = Path(__file__).resolve().parents[2]
SHARED = Path("/dev/shm")
LANGUAGES = frozenset({"sh", "python", "yaml", "json", "text", "ini"})
CHECKED: Mapping[str, str] = {
    "apt-get": "installs packages",
    "cp": "writes to the system's directories",
    "docker": "needs a container engine; tests/integration/test_rootfs.py follows the Dockerfile",
    "git": "needs a network",
    "helm": "needs a cluster; tests/integration/test_chart.py renders the chart",
    "install": "writes to the system's directories",
    "kubectl": "needs a cluster; the manifests are checked against Kubernetes' schemas",
    "make": "is run with -n: its targets are the pipeline's own steps",
    "pip": "needs a network; the requirement must be this tree and an extra that it has",
    "sudo": "needs a password; what it runs is checked in the same way",
    "sysctl": "changes the machine",
    "systemctl": "changes the machine; tests/integration/test_deploy.py checks the units",
    "systemd-sysusers": "changes the machine",
    "vllm": "takes minutes; its options are checked here, make test-engines runs it",
}
"""Programs whose arguments are checked in place of running them, and why."""
SLOW_VERBS = ("bench", "hostile", "torture")
"""Verbs that take minutes: their options are parsed; ``make test-slow`` runs them."""
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LEFT_OUT = re.compile(r"<!-- not run: (.+?) -->\n\Z", re.DOTALL)
_SIZES = ((r"(--memory[ =])\w+", r"\g<1>128MiB"), (r"(_MEMORY=)\w+", r"\g<1>128MiB"))
_ENDED_S = 120.0


@dataclass(frozen=True)
class Block:
    """A fenced block of a page: its first line's number, language, text, and why it is not run."""

    line: int
    language: str
    text: str
    left_out: str


def blocks(page: Path) -> list[Block]:
    """Return the fenced blocks of a page."""
    text = page.read_text()
    found = list[Block]()
    for each in _FENCE.finditer(text):
        comment = _LEFT_OUT.search(text[: each.start()])
        line = text.count("\n", 0, each.start()) + 2
        found.append(Block(line, each[1], each[2], comment[1] if comment else ""))
    return found


class Reader:
    """A user of this machine who follows a page: in a user namespace, where they are not root.

    Args:
        folder: scratch directory; the paths of the pages' examples are replaced by ones in it.
    """

    UID = 61777

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.runtime = folder / "run"
        self.port = free_port()
        self.arena = SHARED / f"kvhearth-{self.UID}"
        """Default place of the cache."""
        self.places = {
            "/etc/kvhearth": folder / "etc",
            "/mnt/nvme0": folder / "nvme0",
            "/mnt/nvme1": folder / "nvme1",
            "/dev/hugepages": folder / "huge",
            "/run/kvhearth": self.runtime / "kvhearth",
        }
        self.words: dict[str, str] = {"127.0.0.1:9460": f"127.0.0.1:{self.port}", " ...\n": "\n"}
        for place in (self.runtime, folder / "bin", *self.places.values()):
            place.mkdir(mode=0o700, exist_ok=True)
        for each in ("deploy", "docs", "pyproject.toml", "Makefile", "Dockerfile", "lab"):
            (folder / each).symlink_to(ROOT / each)
        self._programs()

    @property
    def environment(self) -> dict[str, str]:
        """The reader's environment: no setting of this process's own."""
        kept = {n: v for n, v in os.environ.items() if not n.startswith(("KVHEARTH_", "XDG_"))}
        return {
            **kept,
            "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}",
            "HOME": str(self.folder),
            "XDG_RUNTIME_DIR": str(self.runtime),
            "KVHEARTH_HTTP": f"127.0.0.1:{self.port}",
            "COLUMNS": "100",
        }

    def follow(self, page: Path) -> str:
        """Run the page's blocks; return what they printed. The first failing command ends it.

        Raises:
            AssertionError: a command failed; the message has the block's line and all output.
        """
        script = ["set -e -o pipefail", f"cd {shlex.quote(str(self.folder))}"]
        for block in blocks(page):
            if block.language == "sh" and not block.left_out:
                script += [f"echo '== {page.name}:{block.line}'", self._local(block.text)]
        script.append('for job in $(jobs -p); do kill "$job" || true; done; wait')
        done = subprocess.run(
            [*_ordinary(self.UID), "bash", "-c", "\n".join(script)],
            env=self.environment,
            input="y\n" * 20,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_ENDED_S,
            check=False,
        )
        assert done.returncode == 0, f"exit {done.returncode} on {page.name}:\n{done.stdout}"
        return done.stdout

    def _local(self, text: str) -> str:
        """Return a block with this machine's places and small sizes; a daemon in the foreground is
        started, asked, and ended.
        """
        for word, value in {**self.words, **{k: str(v) for k, v in self.places.items()}}.items():
            text = text.replace(word, value)
        for pattern, value in _SIZES:
            text = re.sub(pattern, value, text)
        text = re.sub(r"(--ssd-dir[s]?[ =][^\s=]+=)\w+", r"\g<1>256MiB", text)
        return re.sub(
            r"(?m)^kvhearth (serve|gateway)(?![^\n]*(\\\n[^\n]*)*& *(#.*)?$)", r"once \1", text
        )

    def _programs(self) -> None:
        """Write the replaced programs, and ``kvhearth`` and ``python`` of this environment."""
        python = shlex.quote(sys.executable)
        check = f"exec {python} {shlex.quote(str(Path(__file__).with_name('pages_check.py')))}"
        texts = dict.fromkeys(CHECKED, f'{check} "$(basename "$0")" "$@"')
        texts["make"] = f'exec /usr/bin/make -C {shlex.quote(str(ROOT))} -n "$@" >/dev/null'
        texts["python"] = f'exec {python} "$@"'
        texts["python3"] = texts["python3.12"] = texts["python3.11"] = f'{check} python3 "$@"'
        command = shlex.quote(str(Path(sys.executable).with_name("kvhearth")))
        slow = "|".join(SLOW_VERBS)
        texts["kvhearth"] = (
            f'case "$1" in {slow}) {check} kvhearth "$@";; esac\nexec {command} "$@"'
        )
        texts["once"] = (
            'dir=""; for word in "$@"; do [ "$before" = --socket-dir ] && dir=$word; before=$word; '
            f'done\n{command} "$@" & daemon=$!\n'
            f'if [ "$1" = serve ]; then {command} health --wait 30 ${{dir:+--socket-dir $dir}}; '
            "else sleep 2; fi || { kill $daemon; exit 1; }\n"
            "kill $daemon; wait $daemon"
        )
        for name, text in texts.items():
            place = self.folder / "bin" / name
            place.write_text(f"#!/bin/bash\n{text}\n")
            place.chmod(0o755)


def _ordinary(uid: int) -> list[str]:
    """Return the words before a command that run it as a user without any right; skips without."""
    user = ["unshare", "--user", f"--map-user={uid}", f"--map-group={uid}"]
    if subprocess.run([*user, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine allows no user namespaces")
    alone = [*user, "--pid", "--fork", "--kill-child", "--mount-proc"]  # nothing is left running
    works = subprocess.run([*alone, "true"], capture_output=True, check=False).returncode == 0
    return alone if works else user


@contextmanager
def reader() -> Iterator[Reader]:
    """A reader with a scratch directory; what they leave on /dev/shm is removed."""
    with tempfile.TemporaryDirectory(prefix="kvh-", ignore_cleanup_errors=True) as folder:
        found = Reader(Path(folder))
        shutil.rmtree(found.arena, ignore_errors=True)
        try:
            yield found
        finally:
            shutil.rmtree(found.arena, ignore_errors=True)
