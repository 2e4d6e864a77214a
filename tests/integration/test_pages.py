"""The commands of README and docs, run as an ordinary user would; see ``support.pages``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.pages import LANGUAGES, ROOT, Reader, blocks, reader

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "CONTRIBUTING.md"]


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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_says_what_it_is(page: Path) -> None:
    wrong = [block.line for block in blocks(page) if block.language not in LANGUAGES]
    assert wrong == [], f"lines of {page.name} with a block of no known language"
