"""Reports of a client: counters over a daemon's restart, and lines in the engine's log."""

from __future__ import annotations

import ast
import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvhearth
from kvhearth.counters import LOGGER, Report, Warnings, log_event

PAGE = Path(__file__).parents[2] / "docs" / "engines.md"


def test_one_boot_hears_totals() -> None:
    report = Report()
    assert report.rise("a", {"loads": 3}) == {"loads": 3}
    report.heard("a")
    assert report.rise("a", {"loads": 5, "stores": 1}) == {"loads": 5, "stores": 1}


def test_the_next_boot_hears_what_no_other_has_heard() -> None:
    report = Report()
    report.rise("a", {"loads": 3})
    report.heard("a")
    report.rise("a", {"loads": 7})  # never answered: the daemon was killed
    assert report.rise("b", {"loads": 9, "failed": 2}) == {"loads": 6, "failed": 2}
    report.heard("b")
    assert report.rise("b", {"loads": 10, "failed": 2}) == {"loads": 7, "failed": 2}
    assert report.rise("c", {"loads": 10, "failed": 4}) == {"loads": 1, "failed": 2}


def test_a_late_answer_of_another_boot_says_nothing() -> None:
    report = Report()
    report.rise("a", {"loads": 3})
    report.heard("b")
    assert report.rise("b", {"loads": 4}) == {"loads": 4}


def logged() -> Iterator[str]:
    """The events of all lines that the client writes."""
    for path in Path(kvhearth.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                name = getattr(node.func, "attr", getattr(node.func, "id", ""))
                if name in {"log_event", "warn", "_log", "_log_failure"}:
                    texts = [each for each in node.args[:2] if isinstance(each, ast.Constant)]
                    yield from (str(each.value) for each in texts[:1])


def test_every_line_is_an_event_that_the_page_lists() -> None:
    events = set(logged())
    assert len(events) > 30
    assert not [event for event in events if not re.fullmatch(r"[a-z_]+\.[a-z_]+", event)]
    section = PAGE.read_text().partition("\n### Log\n")[2].partition("\n### ")[0]
    cells = "".join(row.split("|")[1] for row in section.splitlines() if row.startswith("| `"))
    assert set(re.findall(r"`([^`]+)`", cells)) == events


def test_a_line_has_the_event_a_sentence_and_fields(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, LOGGER.name):
        log_event(logging.INFO, "a.b", "it is so", path="/x y", count=3, said='"', nothing="")
        log_event(logging.DEBUG, "a.c", "not shown")
    assert caplog.messages == ['a.b: it is so path="/x y" count=3 said="\\"" nothing=""']


def test_a_warning_is_written_once_with_the_number_of_those_left_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    warnings = Warnings()
    for call in ("lookup", "commit", "lookup"):
        warnings.warn("call.failed", "no cache", kind=call, call=call)
    warnings._next_at.clear()
    warnings.warn("call.failed", "no cache", kind="lookup", call="lookup")
    first = ["call.failed: no cache call=lookup", "call.failed: no cache call=commit"]
    assert caplog.messages == [*first, "call.failed: no cache call=lookup suppressed=1"]
