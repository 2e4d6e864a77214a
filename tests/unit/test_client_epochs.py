"""The epoch that an engine holds after the daemon was restarted."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.attached import connected
from support.fake_daemon import key, running, small_contract, until

from kvhearth.errors import KVHearthError, Reason
from kvhearth.session.link import WeightsEpoch

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
            until(lambda: client.boot_id == second.boot_id and client.wait_ready(1))

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
            until(lambda: client.boot_id == second.boot_id and client.wait_ready(1))
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
