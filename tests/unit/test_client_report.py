"""Counters that a client reports survive a daemon's restart without being counted twice."""

from __future__ import annotations

from kvhearth.counters import Report


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
