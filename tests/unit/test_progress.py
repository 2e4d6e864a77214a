"""Progress bars on a terminal, none elsewhere, and log lines that do not break them."""

from __future__ import annotations

import os
import pty
import subprocess
import sys

import pytest

from kvhearth_lab.harness import HUNG_S

pytestmark = pytest.mark.realtime("a terminal is a process' own")

PROGRAM = """
from kvhearth_server.observability import logs
from kvhearth_server.observability.logs import StartBar
logs.configure("info", "json")
log = logs.get_logger("kvhearth.test")
with StartBar("reading back") as bar:
    bar.note("files", 1, 4)
    log.info("during")
    bar.note("files", 4, 4)
log.info("after")
"""


def written(stderr: int) -> None:
    """Runs the program with ``stderr``."""
    environ = os.environ | {"TERM": "xterm", "PYTHONPATH": os.pathsep.join(sys.path)}
    words = [sys.executable, "-c", PROGRAM]
    subprocess.run(words, stderr=stderr, env=environ, check=True, timeout=HUNG_S)


def test_a_terminal_has_a_bar_and_whole_lines_of_log() -> None:
    ours, theirs = pty.openpty()
    try:
        written(theirs)
        text = os.read(ours, 1 << 16).decode()
    finally:
        os.close(ours)
        os.close(theirs)
    assert "reading back files" in text
    for event in ("during", "after"):
        (line,) = [line for line in text.splitlines() if f'"event": "{event}"' in line]
        assert "reading back" not in line.rpartition("\x1b[2K")[2]


def test_elsewhere_there_is_only_the_log() -> None:
    reader, writer = os.pipe()
    try:
        written(writer)
        text = os.read(reader, 1 << 16).decode()
    finally:
        os.close(reader)
        os.close(writer)
    assert [line[:1] for line in text.splitlines()] == ["{", "{"]
