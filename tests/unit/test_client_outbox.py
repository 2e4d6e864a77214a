"""The outbox is bounded, merges and batches requests, and retries what gRPC rejects."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from kvhearth.counters import COUNTERS_MAX, Counters, Warnings
from kvhearth.errors import Code
from kvhearth.proto.v1 import cache_pb2 as pb
from kvhearth.session.outbox import RETRIES_MAX, Courier, Outbox, QueuedRequest, batch, merge
from kvhearth.transports.base import ABORT, RELEASE, TOUCH
from kvhearth.wire.frames import error_from_code


def release(lease_id: int, weight: int = 1) -> QueuedRequest:
    request = pb.ReleaseRequest(lease_ids=[lease_id])
    return QueuedRequest(RELEASE, request, weight, "boot", 1, RELEASE.name)


def abort(reservation_id: int, *, in_doubt: bool = False) -> QueuedRequest:
    request = pb.AbortRequest(reservation_ids=[reservation_id], in_doubt=in_doubt)
    return QueuedRequest(ABORT, request, 1, "boot", 1, f"{ABORT.name}:{in_doubt}")


def ids(queued_requests: list[QueuedRequest]) -> list[int]:
    return [queued.request.lease_ids[0] for queued in queued_requests]


def test_a_full_queue_refuses() -> None:
    outbox = Outbox(2)
    assert [outbox.put(release(number)) for number in range(1, 4)] == [True, True, False]
    assert ids(outbox.take()) == [1, 2]
    assert len(outbox) == 0


def touch() -> QueuedRequest:
    return QueuedRequest(TOUCH, pb.TouchRequest(epoch=1), 1, "boot", 1, TOUCH.name)


def test_touches_take_no_room_from_releases() -> None:
    outbox = Outbox(2, touches_max=1)
    assert [outbox.put(touch()) for _ in range(2)] == [True, False]
    assert [outbox.put(release(number)) for number in range(1, 4)] == [True, True, False]
    assert len(outbox) == 3
    taken = outbox.take()
    assert [each.rpc.name for each in taken] == ["Release", "Release", "Touch"]
    assert outbox.put_back([*taken, touch()]) == 1


@pytest.mark.parametrize(("failures", "sent"), [(RETRIES_MAX, 2), (RETRIES_MAX + 3, 0)])
def test_what_grpc_refuses_is_sent_again_a_few_times(
    monkeypatch: pytest.MonkeyPatch, failures: int, sent: int
) -> None:
    monkeypatch.setattr("kvhearth.session.outbox._PAUSE_S", 0.0)
    answers = [error_from_code(Code.INTERNAL, "RST_STREAM")] * failures
    arrived: list[int] = []

    def call(_: Any, __: Any, request: Any) -> None:
        if answers:
            raise answers.pop()
        arrived.extend(request.lease_ids)

    link: Any = SimpleNamespace(boot_id="boot", welcome=SimpleNamespace(session=1, keys_max=64))
    counters = Counters()
    courier = Courier(call, counters, Warnings())
    courier.put(release(1))
    courier.put(release(2))
    for _ in range(RETRIES_MAX + 3):
        courier.deliver(link, time.monotonic() + 5)
    assert len(arrived) == sent
    assert counters.snapshot().get("errands_refused", 0) == 2 - sent


def test_what_is_put_back_goes_first_and_keeps_its_order() -> None:
    outbox = Outbox(4)
    outbox.put(release(9))
    assert outbox.put_back([release(1), release(2)]) == 0
    assert outbox.put_back([release(3), release(4)]) == 1
    assert ids(outbox.take()) == [3, 1, 2, 9]


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
