"""docs/troubleshooting.md has a row for every event that needs somebody, every reason and alert."""

from __future__ import annotations

import re
from pathlib import Path

from kvhearth.errors import ClientReason, Reason

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/troubleshooting.md"
ENDS = {"ssd.degradation_over", "remote.degradation_over"}
"""Ends of what a warning began: good news in the same row of the log's table."""
WORD = re.compile(r"`([a-z_.]+)`")


def rows(page: Path, heading: str) -> list[list[str]]:
    """Return the cells of the table below a heading, without its head."""
    level = heading.partition(" ")[0]
    section = page.read_text().partition(f"\n{heading}\n")[2].partition(f"\n{level} ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


def told(heading: str) -> list[str]:
    """Return the names in the first column of one of the page's tables."""
    found = [name for row in rows(PAGE, heading) for name in WORD.findall(row[0])]
    assert len(found) == len(set(found)), "a name is there twice"
    assert all(len(row) == 2 and row[1] for row in rows(PAGE, heading))
    return found


def serious(page: Path, heading: str) -> set[str]:
    """Return the events of a log's table whose level is warning or error; other tests keep it
    complete.
    """
    found = set()
    for row in rows(page, heading):
        if len(row) >= 3 and re.search("warning|error", row[1]):
            found |= set(WORD.findall(row[0]))
    assert len(found) > 20
    return found


def test_every_event_that_needs_somebody_says_what_to_do() -> None:
    daemon = serious(ROOT / "docs/log.md", "## Events")
    assert set(told("## The daemon's log")) == daemon - ENDS
    engine = serious(ROOT / "docs/engines.md", "### Log")
    assert set(told("## The engine's log")) == engine


def test_every_reason_says_what_to_do() -> None:
    assert set(told("## Reasons")) == {
        str(each) for kind in (Reason, ClientReason) for each in kind
    }
