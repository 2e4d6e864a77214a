"""Logs in both formats, with the standard library's records, at a bounded rate; and counters."""

from __future__ import annotations

import ast
import io
import json
import logging
import re
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.cases import cases
from support.scripted_clock import HandClock

import kvhearth_server
from kvhearth.errors import Reason
from kvhearth_server.observability import logs
from kvhearth_server.observability.counters import LABEL_VALUES_MAX, OTHER, Counters
from kvhearth_server.observability.logs import (
    FOREIGN_CHARS_MAX,
    KINDS_MAX,
    LimitedLog,
    LimitedRecords,
    Throttle,
)
from kvhearth_server.observability.metrics import COUNTERS


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


pytestmark = pytest.mark.usefixtures("restored_logging")


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture
def written() -> io.StringIO:
    """The log in JSON, from the level info on."""
    out = io.StringIO()
    logs.configure("info", "json", out)
    return out


def lines(stream: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_json_where_there_is_no_terminal() -> None:
    out = io.StringIO()
    log = logs.get_logger("kvhearth.test")  # made before ``configure``, like module-level loggers
    logs.configure("info", "auto", out)
    log.bind(boot_id="b1").info("slab given", slot_bytes=65536)
    log.debug("not written")
    (line,) = lines(out)
    assert line["event"] == "slab given"
    assert line["slot_bytes"] == 65536
    assert (line["boot_id"], line["level"], line["logger"]) == ("b1", "info", "kvhearth.test")
    assert str(line["timestamp"]).endswith("Z")


@cases(("stream", "form", "coloured"), [(Terminal, "auto", True), (io.StringIO, "console", False)])
def test_the_console_has_colours_on_a_terminal(
    stream: type[io.StringIO], form: logs.Form, coloured: bool
) -> None:
    out = stream()
    logs.configure("info", form, out)
    logs.get_logger("kvhearth.test").info("slab given", slot_bytes=65536)
    assert "slab given" in out.getvalue()
    assert ("\x1b[" in out.getvalue()) == coloured


def test_standard_library_records_have_the_same_form() -> None:
    out = io.StringIO()
    logs.configure("warning", "json", out)
    logging.getLogger("asyncio").warning("slow %s", "callback", extra={"seconds": 2})
    logging.getLogger("grpc").info("not written")
    (line,) = lines(out)
    assert (line["event"], line["level"], line["logger"]) == ("slow callback", "warning", "asyncio")
    assert line["seconds"] == 2


def test_exceptions_are_one_json_line(written: io.StringIO) -> None:
    try:
        raise RuntimeError("broken")
    except RuntimeError:
        logs.get_logger("kvhearth.test").exception("task failed")
    (line,) = lines(written)
    assert "RuntimeError: broken" in str(line["exception"])


FORGED = 'forged\n\x1b[31m{"event": "ready"}\r\x9b1m'


@cases("name", ["kvhearth.test", "asyncio"])
@cases("form", ["json", "console"])
def test_what_a_peer_says_stays_on_its_line(form: logs.Form, name: str) -> None:
    """Neither a forged line nor an escape of a terminal reaches the log."""
    out = io.StringIO()
    logs.configure("info", form, out)
    log = logging.getLogger(name)
    log.warning(FORGED)
    log.warning("known", extra={"peer": FORGED})
    logs.get_logger(name).warning("known", why=FORGED)
    try:
        raise RuntimeError(FORGED)
    except RuntimeError:
        log.exception("failed")
        logs.get_logger(name).exception("failed")
    text = out.getvalue()
    assert [each for each in text if not each.isprintable() and each != "\n"] == []
    assert text.count("forged") >= 4
    begun = [line for line in text.splitlines() if line[:1] not in ("{", " ", "2")]
    assert begun == []
    assert not any(line.startswith('{"event": "ready"}') for line in text.splitlines())


def test_what_python_prints_by_itself_is_logged(written: io.StringIO) -> None:
    hook = sys.unraisablehook
    logging.captureWarnings(False)  # another test may have turned it on
    try:
        logs.capture()
        with warnings.catch_warnings():
            warnings.simplefilter("default")
            warnings.warn("old", stacklevel=1)
        kept = [_Broken()]
        kept.clear()
    finally:
        sys.unraisablehook = hook
        logging.captureWarnings(False)
    found = {line["logger"]: line for line in lines(written)}
    assert "old" in str(found["py.warnings"]["event"])
    assert "RuntimeError: broken" in str(found["python"]["exception"])


class _Broken:
    def __del__(self) -> None:
        raise RuntimeError("broken")


def test_a_second_call_replaces_the_first(written: io.StringIO) -> None:
    second = io.StringIO()
    logs.configure("info", "json", second)
    logs.get_logger("kvhearth.test").info("once")
    assert written.getvalue() == ""
    assert len(lines(second)) == 1


# -- floods ----------------------------------------------------------------------------------------


def test_a_flood_is_one_a_second_with_a_count(clock: HandClock, written: io.StringIO) -> None:
    log = LimitedLog(logs.get_logger("kvhearth.test"), Throttle(1.0, clock))
    for number in range(1000):
        log.warning("refused", kind="bad_message", uid=number)
    log.warning("refused", kind="deadline", uid=7)
    clock.now += 1.0
    log.warning("refused", kind="bad_message", uid=8)
    clock.now += 5.0
    log.warning("refused", kind="bad_message", uid=9)
    found = [(line["uid"], line.get("suppressed"), line["level"]) for line in lines(written)]
    assert found == [
        (0, None, "warning"),
        (7, None, "warning"),
        (8, 999, "warning"),
        (9, None, "warning"),
    ]


def test_a_burst_passes_and_the_rest_is_counted(clock: HandClock, written: io.StringIO) -> None:
    log = LimitedLog(logs.get_logger("kvhearth.test"), Throttle(1.0, clock, burst=3))
    for number in range(10):
        log.info("engine.attached", kind="engine.attached", pid=number)
    clock.now += 0.9
    log.info("engine.attached", kind="engine.attached", pid=10)
    clock.now += 0.1
    log.info("engine.attached", kind="engine.attached", pid=11)
    log.info("engine.attached", kind="engine.attached", pid=12)
    found = [(line["pid"], line.get("suppressed"), line["level"]) for line in lines(written)]
    assert found == [
        (n, s, "info") for n, s in [(0, None), (1, None), (2, None), (11, 8), (12, None)]
    ]


def test_kinds_have_a_bound(clock: HandClock) -> None:
    throttle = Throttle(1.0, clock)
    admitted = [throttle.admit(f"k{number}") for number in range(10 * KINDS_MAX)]
    assert admitted.count(0) == KINDS_MAX + 1
    clock.now += 1.0
    assert throttle.admit("k0") == 0
    assert throttle.admit("another") == 9 * KINDS_MAX - 1


def test_other_packages_records_by_their_place_in_the_code(
    clock: HandClock, written: io.StringIO
) -> None:
    """Errors too: a peer can cause both, and choose the text."""
    log = logging.getLogger("grpc.test.records")
    log.addFilter(LimitedRecords(Throttle(1.0, clock)))
    for number in range(10):
        log.warning(f"no HTTP from {number}")
        log.error("no file for %d", number)
    clock.now += 1.0
    for number in range(10, 12):
        log.warning(f"no HTTP from {number}")
    found = [(line["event"], line.get("suppressed")) for line in lines(written)]
    assert found == [
        ("no HTTP from 0", None),
        ("no file for 0", None),
        ("no HTTP from 10", None),
    ]


def test_a_flood_of_another_package_does_not_reach_the_log(written: io.StringIO) -> None:
    log = logging.getLogger("uvicorn.error")
    for number in range(2000):
        log.error(f"{number} " + "x" * 10_000)
    assert 1 <= len(lines(written)) < 100
    assert len(written.getvalue()) < 100 * (FOREIGN_CHARS_MAX + 500)


def test_our_own_records_all_pass(written: io.StringIO) -> None:
    log = logs.get_logger("kvhearth.test")
    for number in range(100):
        log.error("a bug", number=number)
    assert [line["number"] for line in lines(written)] == list(range(100))


# -- counters --------------------------------------------------------------------------------------


def test_counters_start_at_zero_and_rise() -> None:
    counters = Counters(COUNTERS)
    assert counters.snapshot()["lookups"] == 0
    counters.add("lookups")
    counters.add("lookup_keys", 12)
    counters.add("refusals", label=Reason.NO_SPACE)
    counters.add("refusals", 2, "draining")
    counters.add("evicted_blocks", 0, "capacity")
    snapshot = counters.snapshot()
    assert (snapshot["lookups"], snapshot["lookup_keys"]) == (1, 12)
    assert (snapshot["refusals{no_space}"], snapshot["refusals{draining}"]) == (1, 2)
    assert "evicted_blocks{capacity}" not in snapshot
    assert counters.get("refusals") == 3
    assert counters.get("refusals", "draining") == 2


@cases(
    ("name", "n", "label"),
    [
        ("lookpus", 1, ""),
        ("lookups", -1, ""),
        ("lookups", 1, "label"),
        ("refusals", 1, ""),
        ("evicted_blocks", 1, "Not A Word"),
        ("evicted_blocks", 1, "x" * 49),
    ],
)
def test_what_cannot_be_counted(name: str, n: int, label: str) -> None:
    counters = Counters(COUNTERS)
    before = counters.snapshot()
    with pytest.raises(ValueError, match="counter"):
        counters.add(name, n, label)
    assert counters.snapshot() == before


def test_label_values_are_bounded() -> None:
    counters = Counters(COUNTERS)
    for index in range(LABEL_VALUES_MAX + 5):
        counters.add("task_failures", label=f"task{index}")
    counters.add("task_failures", label="task0")
    snapshot = counters.snapshot()
    assert snapshot[f"task_failures{{{OTHER}}}"] == 5
    assert snapshot["task_failures{task0}"] == 2
    assert sum(name.startswith("task_failures{") for name in snapshot) == LABEL_VALUES_MAX + 1


def test_threads_lose_no_count() -> None:
    counters = Counters(COUNTERS)

    def add() -> None:
        for _ in range(2000):
            counters.add("summed_blocks")

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counters.get("summed_blocks") == 8000


LOG_METHODS = frozenset({"debug", "info", "warning", "error", "exception"})


def _logged() -> Iterator[ast.expr]:
    """The events of all log calls of the daemon, and the ones that the attach socket hands on."""
    for path in Path(kvhearth_server.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
                if node.func.attr in LOG_METHODS:
                    yield node.args[0]
                elif node.func.attr == "_tell":
                    yield from node.args[2:]


def test_events_are_keys_that_the_page_of_the_log_lists() -> None:
    logged = list(_logged())
    assert not [ast.unparse(each) for each in logged if isinstance(each, ast.JoinedStr)]
    events = {each.value for each in logged if isinstance(each, ast.Constant)}
    assert len(events) > 30
    assert not [event for event in events if not re.fullmatch(r"[a-z_]+(\.[a-z_]+)?", event)]
    page = (Path(__file__).parents[2] / "docs" / "log.md").read_text()
    section = page.partition("\n## Events\n")[2].partition("\n## ")[0]
    rows = [line.split("|") for line in section.splitlines() if line.startswith("| `")]
    cells = "".join(row[1] for row in rows if len(row) == 6)  # the others list fields
    by_verb = {"admin.evict", "admin.forget", "admin.drain", "admin.reload"}
    assert set(re.findall(r"`([^`]+)`", cells)) == events | by_verb
