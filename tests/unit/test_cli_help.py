"""Help of ``kvhearth``: examples, --json at every verb, exit codes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import typer
from support.cases import cases

from kvhearth_server.cli import app

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


@cases("words", VERBS)
def test_every_verb_has_an_example_and_json(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    assert re.search(r"Examples?: .*kvhearth " + r"\s".join(words), _reported(capsys, *words))
    options = {name for parameter in VERBS[words].params for name in parameter.opts}
    assert ("--json" in options) == (words[0] not in WITHOUT_JSON)


@cases("words", [(), ("config",), ("token",), ("remote",), ("bench",)])
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
