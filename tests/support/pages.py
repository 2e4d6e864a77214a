"""The fenced blocks of documents, and a user who follows one of them: one shell, real commands."""

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

from kvhearth_lab.harness import HUNG_S
from support.daemon import free_port

ROOT = Path(__file__).resolve().parents[2]
STUBS: Mapping[str, str] = {
    "make": "exit 0",
    "pip": "exit 0",
    "python3": 'mkdir -p "$3/bin" && touch "$3/bin/activate"',
    "vllm": "exit 0",
}
"""Programs that need a network or minutes, and what a reader runs in their place."""
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page: its first line's number, its language, and its text."""

    line: int
    language: str
    text: str

    def commands(self) -> list[list[str]]:
        """Return the words of each simple command; what follows a ``>`` is a file."""
        text = self.text.replace("\\\n", " ")
        found: list[list[str]] = []
        for line in re.split(r"\n(?=(?:[^']*'[^']*')*[^']*\Z)", text):
            lexer = shlex.shlex(line, posix=True, punctuation_chars="();|&")
            lexer.whitespace_split = True
            command: list[str] = []
            for word in [*lexer, ";"]:
                if set(word) <= set("();|&"):
                    found += [command] if command else []
                    command = []
                elif command or word != "!":
                    command.append(word)
        return found


def blocks(page: Path) -> list[Block]:
    """Return the fenced blocks of a page."""
    text = page.read_text()
    return [
        Block(text.count("\n", 0, each.start()) + 2, each[1], each[2])
        for each in _FENCE.finditer(text)
    ]


class Reader:
    """A user of this machine who follows a page: in a user namespace, where they are not root.

    Args:
        folder: scratch directory.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.uid = 1_000_000 + os.getpid()
        self.arena = Path(f"/dev/shm/kvhearth-{self.uid}")
        """Default place of the cache."""
        for each in ("deploy", "docs", "pyproject.toml"):
            (folder / each).symlink_to(ROOT / each)
        python, command = sys.executable, Path(sys.executable).with_name("kvhearth")
        real = {"python": python, "kvhearth": str(command)}
        (folder / "bin").mkdir()
        for name, text in {
            **STUBS,
            **{name: f'exec {shlex.quote(path)} "$@"' for name, path in real.items()},
        }.items():
            place = folder / "bin" / name
            place.write_text(f"#!/bin/bash\n{text}\n")
            place.chmod(0o755)

    @property
    def environment(self) -> dict[str, str]:
        """The reader's environment: no setting of this process's own."""
        kept = {n: v for n, v in os.environ.items() if not n.startswith(("KVHEARTH_", "XDG_"))}
        return {
            **kept,
            "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}",
            "HOME": str(self.folder),
            "XDG_RUNTIME_DIR": str(self.folder),
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
            if block.language == "sh":
                text = block.text.replace("127.0.0.1:9460", f"127.0.0.1:{self.port}")
                text = re.sub(r"(--memory[ =])\w+", r"\g<1>128MiB", text)
                script += [f"echo '== {page.name}:{block.line}'", text]
        done = subprocess.run(
            [*_ordinary(self.uid), "bash", "-c", "\n".join(script)],
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=HUNG_S,
            check=False,
        )
        assert done.returncode == 0, f"exit {done.returncode} on {page.name}:\n{done.stdout}"
        return done.stdout


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
        try:
            yield found
        finally:
            shutil.rmtree(found.arena, ignore_errors=True)
