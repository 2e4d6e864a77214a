"""Parts of a session: counters that it reports, log lines, the epoch, and the bounded outbox."""

from __future__ import annotations

import ast
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.attached import connected
from support.fake_daemon import key, running, small_contract
from support.scripted_clock import ScriptedClock

import kvhearth
from kvhearth.counters import COUNTERS_MAX, LOGGER, Counters, Report, Warnings, log_event
from kvhearth.errors import Code, KVHearthError, Reason
from kvhearth.proto.v1 import cache_pb2 as pb
from kvhearth.session.link import WeightsEpoch
from kvhearth.session.manager import RETRIES_MAX, Courier, Outbox, QueuedRequest, batch, merge
from kvhearth.transports.base import ABORT, LOOKUP, RELEASE, TOUCH
from kvhearth.wire.frames import error_from_code

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


KEYS = {0: [key(1)]}


@pytest.mark.parametrize("outdated", [False, True])
def test_a_cold_restart_takes_those_along_that_were_up_to_date(
    tmp_path: Path, outdated: bool
) -> None:
    with connected(tmp_path) as client:
        with running(tmp_path, small_contract()) as first:
            assert client.wait_ready(10)
            if outdated:
                client.use_epoch(6)
                assert first.epoch == 7
        cold = 1000
        with running(tmp_path, small_contract(), epoch=cold) as second:
            client.clock.until(lambda: client.boot_id == second.boot_id)
            assert client.wait_ready(1)

            def stale(_: object) -> None:
                raise KVHearthError(Reason.STALE_EPOCH, "as the daemon does")

            if not outdated:
                assert client.epoch == cold
                assert client.lookup(KEYS).reason == ""
                return
            assert client.epoch == 6
            second.answer("Lookup", stale)
            assert client.lookup(KEYS).reason == Reason.STALE_EPOCH
            assert client.bump_epoch() == cold + 1
            assert client.lookup(KEYS).reason == ""


def test_a_bump_before_a_warm_restart_is_anothers(tmp_path: Path) -> None:
    with connected(tmp_path) as client:
        with running(tmp_path, small_contract()) as first:
            assert client.wait_ready(10)
            lineage, epoch = first.lineage, first.epoch
        with running(tmp_path, small_contract(), epoch=epoch + 1, lineage=lineage) as second:
            client.clock.until(lambda: client.boot_id == second.boot_id)
            assert client.wait_ready(1)
            assert client.epoch == epoch


def test_what_a_warm_restart_brings_is_anothers_however_soon_it_comes() -> None:
    epochs = WeightsEpoch()
    epochs.attached("b1", 100, "cold")
    epochs.heard("b1", 100)
    epochs.attached("b2", 101, "cold")
    assert (epochs.own, epochs.daemon) == (100, 101)
    epochs.attached("b3", 500, "colder")
    assert (epochs.own, epochs.daemon) == (100, 500)


def test_what_a_cold_start_brings_is_ours_if_we_were_up_to_date() -> None:
    epochs = WeightsEpoch()
    epochs.attached("a", 990, "first")
    epochs.bumped("a", 991)
    epochs.attached("b", 1011, "second")
    assert (epochs.own, epochs.daemon) == (1011, 1011)
    epochs.heard("a", 5000)
    assert (epochs.own, epochs.daemon) == (1011, 1011)
    # The clock went back between the two starts: the epoch is lower but still ours.
    epochs.attached("c", 7, "third")
    assert (epochs.own, epochs.daemon) == (7, 7)


@pytest.mark.parametrize(("before", "after"), [("", "x"), ("x", ""), ("", "")])
def test_without_a_lineage_no_start_is_taken_for_a_cold_one(before: str, after: str) -> None:
    epochs = WeightsEpoch()
    epochs.attached("a", 990, before)
    epochs.attached("b", 1011, after)
    assert (epochs.own, epochs.daemon) == (990, 1011)


def test_weights_without_an_epoch_stay_so() -> None:
    epochs = WeightsEpoch()
    epochs.use(-1)
    epochs.attached("a", 7)
    assert (epochs.own, epochs.daemon) == (-1, 7)


def release(lease_id: int, weight: int = 1) -> QueuedRequest:
    request = pb.ReleaseRequest(lease_ids=[lease_id])
    return QueuedRequest(RELEASE, request, weight, "boot", 1, RELEASE.name)


def abort(reservation_id: int, *, in_doubt: bool = False) -> QueuedRequest:
    request = pb.AbortRequest(reservation_ids=[reservation_id], in_doubt=in_doubt)
    return QueuedRequest(ABORT, request, 1, "boot", 1, f"{ABORT.name}:{in_doubt}")


def ids(queued_requests: list[QueuedRequest]) -> list[int]:
    return [queued.request.lease_ids[0] for queued in queued_requests]


def touch() -> QueuedRequest:
    return QueuedRequest(TOUCH, pb.TouchRequest(epoch=1), 1, "boot", 1, TOUCH.name)


def test_touches_take_no_room_from_releases() -> None:
    outbox = Outbox(2, touches_max=1)
    first, second = touch(), touch()
    assert [outbox.put(each) for each in (first, second)] == [None, first]
    releases = [release(number) for number in range(1, 4)]
    assert [outbox.put(each) for each in releases] == [None, None, releases[2]]
    assert len(outbox) == 3
    taken = outbox.take()
    assert [each.rpc.name for each in taken] == ["Release", "Release", "Touch"]
    assert len(outbox.put_back([*taken, touch()])) == 1


def test_lookups_precede_the_releases_of_their_leases_and_take_no_room_from_them() -> None:
    outbox = Outbox(2, touches_max=3)
    lookup = QueuedRequest(LOOKUP, pb.LookupRequest(lease_id=7), 1, "boot", 1, "Lookup:7")
    put = [release(7), touch(), touch(), lookup, release(8), lookup]
    assert [outbox.put(each) for each in put] == [None] * 5 + [put[1]]
    taken = outbox.take()
    assert [each.rpc.name for each in taken] == ["Lookup"] * 2 + ["Release"] * 2 + ["Touch"]
    assert not outbox.take()


@pytest.mark.parametrize(("failures", "sent"), [(RETRIES_MAX, 2), (RETRIES_MAX + 3, 0)])
def test_what_grpc_refuses_is_sent_again_a_few_times(
    clock: ScriptedClock, failures: int, sent: int
) -> None:
    answers = [error_from_code(Code.INTERNAL, "RST_STREAM")] * failures
    arrived: list[int] = []

    def call(_: Any, __: Any, request: Any) -> None:
        if answers:
            raise answers.pop()
        arrived.extend(request.lease_ids)

    link: Any = SimpleNamespace(boot_id="boot", welcome=SimpleNamespace(session=1, keys_max=64))
    counters = Counters()
    courier = Courier(call, counters, Warnings(), clock)
    courier.put(release(1))
    courier.put(release(2))
    for _ in range(RETRIES_MAX + 3):
        courier.deliver(link, clock.now() + 5)
        clock.pass_time(0.25)
    assert len(arrived) == sent
    assert counters.snapshot().get("errands_refused", 0) == 2 - sent


def test_batches_keep_kinds_apart_and_weights_bounded() -> None:
    queued_requests = [
        release(1),
        abort(5),
        release(2, 3),
        abort(6, in_doubt=True),
        release(3),
        abort(7),
    ]
    batches = batch(queued_requests, weight_max=4)
    assert [len(each) for each in batches] == [2, 2, 1, 1]
    assert ids(batches[0]) == [1, 2]
    assert [list(merge(each).reservation_ids) for each in batches[1:3]] == [[5, 7], [6]]
    assert [merge(each).in_doubt for each in batches[1:3]] == [False, True]
    assert ids(batches[3]) == [3]


def test_a_message_carries_a_bounded_number_of_groups() -> None:
    queued_requests = [release(number)._replace(parts=16) for number in range(5)]
    assert [len(each) for each in batch(queued_requests, 1000)] == [4, 1]


def test_one_errand_that_is_too_heavy_travels_alone() -> None:
    assert [ids(each) for each in batch([release(1, 99), release(2)], 4)] == [[1], [2]]


def test_counter_names_are_bounded() -> None:
    counters = Counters()
    for number in range(COUNTERS_MAX * 2):
        counters.add(f"name{number}")
    values = counters.snapshot()
    assert len(values) == COUNTERS_MAX
    assert sum(values.values()) == COUNTERS_MAX * 2
    assert values["other"] == COUNTERS_MAX + 1


def test_counters_add_one_by_one_and_together() -> None:
    counters = Counters()
    counters.add("a")
    counters.add_all({"a": 2, "b": 3})
    counters.add("b", 4)
    assert counters.snapshot() == {"a": 3, "b": 7}
    counters.add_all({str(number): 1 for number in range(COUNTERS_MAX)})
    counters.add("one more")
    found = counters.snapshot()
    assert len(found) == COUNTERS_MAX
    assert found["other"] == COUNTERS_MAX + 1 - (COUNTERS_MAX - 3)
    assert (found["a"], found["b"]) == (3, 7)
