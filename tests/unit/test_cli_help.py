"""Help of ``kvhearth``: examples, --json at every verb, exit codes, completion."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from support.entry_point import kvhearth

from kvhearth_server.cli import app

PROGRAMS = Path(sys.executable).parent
WITHOUT_JSON = {"gateway", "serve"}
"""Verbs that print nothing on stdout; the daemon's log is JSON off a terminal."""


def _verbs(command: Any, *path: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yields every leaf command with the words that call it."""
    below = getattr(command, "commands", None)
    if below is None:
        yield path, command
        return
    for name in below:
        yield from _verbs(below[name], *path, name)


VERBS = dict(_verbs(typer.main.get_command(app.build())))


def _reported(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert app.run([*words, "--help"]) == 0
    return capsys.readouterr().out


def test_all_verbs_are_there() -> None:
    wanted = {"serve", "stat", "health", "doctor", "ls", "sessions", "leases", "evict", "drain"}
    wanted |= {"explain", "top", "events", "mrc", "forget", "size", "init", "gateway"}
    groups = {"config": ("show", "sample", "reload"), "token": ("new", "ls"), "bench": ("local",)}
    groups["remote"] = ("init-key", "usage", "sweep", "purge")
    below = {(group, name) for group, names in groups.items() for name in names}
    assert {(name,) for name in wanted} | below <= VERBS.keys()


@pytest.mark.parametrize("words", VERBS, ids=" ".join)
def test_every_verb_has_an_example_and_json(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    assert re.search(r"Examples?: .*kvhearth " + r"\s".join(words), _reported(capsys, *words))
    options = {name for parameter in VERBS[words].params for name in parameter.opts}
    assert ("--json" in options) == (words[0] not in WITHOUT_JSON)


@pytest.mark.parametrize("words", [(), ("config",), ("token",), ("remote",), ("bench",)])
def test_groups_have_examples(capsys: pytest.CaptureFixture[str], words: tuple[str, ...]) -> None:
    assert re.search(r"Examples?: kvhearth ", _reported(capsys, *words))


def test_what_people_try_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["-h"]) == 0
    assert "Exit codes" in capsys.readouterr().out
    assert app.run(["stat", "-h"]) == 0
    assert "--socket-dir" in capsys.readouterr().out


def test_exit_codes_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    text = _reported(capsys)
    codes = {int(code) for code in re.findall(r"^ (\d)  \w", text, flags=re.MULTILINE)}
    assert codes == {0, app.EXIT_OTHER, app.EXIT_CONFIG, app.EXIT_MEMORY}
    assert {app.EXIT_OTHER, *app.EXIT_CODES.values()} <= codes
    assert "--install-completion" in text


# -- how a command ends ------------------------------------------------------------------------

ENDING = """
import atexit, threading
atexit.register(print, "at its end")
threading.Thread(target=threading.Event().wait).start()
"""
"""Statements before a command: a thread that never ends, as a library may leave one."""


@pytest.mark.parametrize(("words", "code"), [(["--version"], 0), (["stat"], 1), (["nothing"], 2)])
def test_a_command_ends_with_its_code_and_all_that_it_printed(
    tmp_path: Path, words: list[str], code: int
) -> None:
    done = kvhearth(*words, prelude=ENDING, KVHEARTH_SOCKET_DIR=str(tmp_path))
    assert done.returncode == code, done.stderr
    *printed, last = done.stdout.splitlines()
    assert last == "at its end"
    assert bool(printed) == (code == 0) == (not done.stderr)


# -- completion --------------------------------------------------------------------------------


def _completed(shell: str, words: str) -> str:
    """Returns the program's answer to a shell's completion script."""
    action = {"_TYPER_COMPLETE_FISH_ACTION": "get-args", "_TYPER_COMPLETE_ARGS": words}
    environment = os.environ | action | {"_KVHEARTH_COMPLETE": f"complete_{shell}"}
    done = subprocess.run(
        [PROGRAMS / "kvhearth"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.stderr == ""
    return done.stdout


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_completion_of_other_shells(shell: str) -> None:
    found = _completed(shell, "kvhearth e")
    assert "explain" in found
    assert "evict" in found
    assert "doctor" not in found


def test_completion_in_a_real_bash(tmp_path: Path) -> None:
    """Installs completion as the help says, into a temporary home, and presses Tab."""
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("needs bash")
    environment = {"PATH": f"{PROGRAMS}:{os.environ['PATH']}", "HOME": str(tmp_path)}
    script = """
    kvhearth --install-completion bash >/dev/null
    . "$HOME/.bashrc"
    ask() {
      COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _kvhearth_completion kvhearth
      echo "${COMPREPLY[@]}"
    }
    ask kvhearth e
    ask kvhearth config s
    ask kvhearth health --w
    """
    environment["_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION"] = "1"
    done = subprocess.run(
        [bash, "--norc", "-c", script],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.stderr == ""
    assert [sorted(line.split()) for line in done.stdout.splitlines()] == [
        ["events", "evict", "explain"],
        ["sample", "show"],
        ["--wait"],
    ]
