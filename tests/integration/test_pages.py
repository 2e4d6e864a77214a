"""The commands of README and docs: two guides are run, each command of the others must exist."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import typer.main
from support.pages import ROOT, Reader, blocks, reader

from kvhearth.connectors.core.settings import parse_settings
from kvhearth.connectors.vllm.adapter import VllmSettings
from kvhearth_server.cli.app import build

PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    *sorted((ROOT / "deploy").rglob("README.md")),
]
LANGUAGES = {"sh", "python", "yaml", "json", "text", "ini"}
PROGRAMS = {"kvhearth", "make", "curl", "python", "python3", "pip", "vllm", "docker", "kubectl"}
REQUIREMENT = re.compile(r"(\.|\./lab|kvhearth)(\[([a-z,]+)\])?")


@pytest.fixture
def user() -> Iterator[Reader]:
    """A reader who is not root and has no daemon."""
    with reader() as found:
        yield found


def test_the_readmes_quickstart_is_true(user: Reader) -> None:
    told = user.follow(ROOT / "README.md")
    assert told.count("\nserving\n") == 2
    assert "0 of 8 blocks were there\n8 stored, 0 there already" in told
    assert "8 of 8 blocks were there\n0 stored, 8 there already" in told
    assert told.count("128 tokens need no prefill") == 2
    assert ": served\n" in told, "explain finds the key that the page shows"
    assert not user.arena.exists()


def test_the_way_to_a_misss_reason_is_true(user: Reader) -> None:
    told = user.follow(ROOT / "docs/quickstart.md")
    assert "the contract is no reason for a miss" in told
    assert "differs in 1:" in told
    assert ": served\n" in told
    assert told.count("is absent: never stored, evicted") == 2
    assert told.count("8 of 8 blocks were there") == 2
    assert "\nkeys_max: " in told, "the settings are shown"
    assert not user.arena.exists()


# -- each command exists ---------------------------------------------------------------------------


def check_verb(*words: str) -> None:
    """Parse the arguments of ``kvhearth`` without running it."""
    command: Any = typer.main.get_command(build())
    left = list(words)
    while left and left[0] in getattr(command, "commands", {}):
        command = command.commands[left.pop(0)]
    if left[:1] not in (["--version"], ["--help"]):
        assert not hasattr(command, "commands"), f"there is no {left[:1]}"
        command.make_context("kvhearth", left)


def check_pip(*words: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for word in words[1:]:
        found = REQUIREMENT.fullmatch(word)
        assert found, f"{word} is not this tree"
        extras = set(filter(None, (found[3] or "").split(",")))
        assert extras <= set(project["optional-dependencies"]), word


def check_vllm(*words: str) -> None:
    given = words[words.index("--kv-transfer-config") + 1]
    file = re.fullmatch(r"\$\(cat (\S+)\)", given)
    transfer = json.loads((ROOT / file[1]).read_text() if file else given)
    assert words[0] == "serve"
    assert transfer["kv_load_failure_policy"] == "recompute", "a lost block would end a request"
    extra = transfer.get("kv_connector_extra_config", {})
    if transfer["kv_connector"] == "OffloadingConnector":
        assert [tier["type"] for tier in extra["secondary_tiers"]] == ["KVHearthTier"]
    else:
        assert transfer["kv_connector"] == "KVHearthConnector"
        parse_settings(VllmSettings, extra, {})


def check_make(*words: str) -> None:
    text = (ROOT / "Makefile").read_text()
    for target in (word for word in words if "=" not in word):
        assert re.search(rf"^{target}:", text, re.MULTILINE), f"there is no target {target}"


CHECKS = {"kvhearth": check_verb, "pip": check_pip, "vllm": check_vllm, "make": check_make}


def check(command: Sequence[str]) -> None:
    """Fail unless a program of ours takes its arguments, and named files of this tree exist."""
    words = [word for word in command if "=" not in word or not word.split("=")[0].isupper()]
    ends = [at for at, word in enumerate(words) if re.match(r"2?>", word)]
    words = words[: min(ends, default=len(words))]
    for at, word in enumerate(words):
        if word.startswith(("deploy/", "docs/", "lab/")):
            assert (ROOT / word).exists(), f"there is no {word}"
        if (name := Path(word).name) in CHECKS and at in (0, 3 if words[0] == "sudo" else 0):
            CHECKS[name](*words[at + 1 :])


def wrong_ones(page: Path) -> list[str]:
    found = []
    for block in blocks(page):
        for command in block.commands() if block.language == "sh" else ():
            try:
                check(command)
            except Exception as error:  # noqa: BLE001 - whatever is wrong with it is told
                found.append(f"{page.name}:{block.line}: {' '.join(command)}: {error}")
    for text in re.findall(r"`(kvhearth [a-z][^`]*)`", page.read_text()):
        if "..." not in text and not re.search(r"\[|\bVERB\b|\|", text):
            found += unknown_options(page, text.split()[1:])
    return found


def unknown_options(page: Path, words: list[str]) -> list[str]:
    """Return what is wrong with a command within a sentence, which may lack arguments."""
    command: Any = typer.main.get_command(build())
    left = list(words)
    while left and left[0] in getattr(command, "commands", {}):
        command = command.commands[left.pop(0)]
    options = {name for each in command.params for name in (*each.opts, *each.secondary_opts)}
    used = {word.partition("=")[0] for word in left if word.startswith("--")} - {"--help"}
    if getattr(command, "commands", None) and left:
        return [f"{page.name}: kvhearth {' '.join(words)}"]
    return [f"{page.name}: kvhearth {' '.join(words)}: {each}" for each in used - options]


def test_every_command_of_a_page_exists() -> None:
    assert [each for page in PAGES for each in wrong_ones(page)] == []


def test_every_block_says_what_it_is() -> None:
    """A command in a block of another language would not be checked."""
    for page in PAGES:
        found = blocks(page)
        assert len(found) == page.read_text().count("\n```") / 2, page.name
        assert [each.line for each in found if each.language not in LANGUAGES] == [], page.name
        for block in (each for each in found if each.language in ("text", "yaml")):
            words = {line.split()[0] for line in block.text.splitlines() if line.split()}
            assert not words & PROGRAMS, f"{page.name}:{block.line}"
