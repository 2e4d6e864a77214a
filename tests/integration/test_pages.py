"""The commands of README and docs, run as an ordinary user would; see ``support.pages``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer.main
from support.pages import CHECKED, LANGUAGES, ROOT, Reader, blocks, reader

from kvhearth_server.cli.app import build

GUIDES = [ROOT / "README.md", ROOT / "docs/quickstart.md"]
"""Pages for somebody without a daemon. The others are for somebody who has one."""
PAGES = [
    *GUIDES,
    *(page for page in sorted((ROOT / "docs").glob("*.md")) if page not in GUIDES),
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    *sorted((ROOT / "deploy").rglob("README.md")),
]
WITH_COMMANDS = [page for page in PAGES if any(b.language == "sh" for b in blocks(page))]
PROGRAMS = ("kvhearth", "make", "curl", "python", "python3", *CHECKED)


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


OTHERS = [page for page in WITH_COMMANDS if page not in GUIDES]


@pytest.mark.parametrize("page", OTHERS, ids=lambda page: f"{page.parent.name}-{page.stem}")
def test_the_commands_of_a_page_work(user: Reader, page: Path) -> None:
    """They are for somebody whose daemon runs, with an engine's blocks in it."""
    user.prepare()
    user.follow(page)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}-{page.stem}")
def test_every_block_says_what_it_is(page: Path) -> None:
    """A command in a block of another language would not be run."""
    found = blocks(page)
    assert len(found) == page.read_text().count("\n```") / 2
    assert [block.line for block in found if block.language not in LANGUAGES] == []
    others = [block for block in found if block.language in ("text", "yaml")]
    for block in others:
        words = [line.split()[0] for line in block.text.splitlines() if line.split()]
        assert not set(words) & set(PROGRAMS), f"{page.name}:{block.line}"


def test_every_command_in_a_sentence_is_one() -> None:
    """`kvhearth VERB --option` within a text: the verb and its options are there."""
    root = typer.main.get_command(build())
    wrong = []
    for page in PAGES:
        for text in re.findall(r"`kvhearth ([a-z][^`]*)`", page.read_text()):
            words, command = text.split(), root
            while words and words[0] in getattr(command, "commands", {}):
                command = command.commands[words.pop(0)]  # type: ignore[attr-defined]
            options = {
                name for each in command.params for name in (*each.opts, *each.secondary_opts)
            }
            used = {word.partition("=")[0] for word in words if word.startswith("--")}
            if getattr(command, "commands", None) and words[:1] not in ([], ["..."]):
                wrong.append(f"{page.name}: {text}")
            wrong += [f"{page.name}: {text}: {each}" for each in used - options - {"--help"}]
    assert wrong == []


def test_what_is_only_checked_is_told_with_its_reason() -> None:
    page = (ROOT / "docs/testing.md").read_text()
    for program, why in CHECKED.items():
        assert f"| `{program}` | {why} |" in page
    left_out = [f"{p.name}: {b.left_out}" for p in PAGES for b in blocks(p) if b.left_out]
    assert all(reason.partition(": ")[2] for reason in left_out)
    assert len(left_out) <= 3, left_out
