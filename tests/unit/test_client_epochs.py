"""Whose epoch an engine has after the daemon started anew."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from support.attached import connected
from support.fake_daemon import key, running, small_contract, until

from kvhearth.epochs import Epochs
from kvhearth.errors import KVHearthError, Reason

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
        cold = int(time.time()) + 1
        with running(tmp_path, small_contract()) as second:
            second.epoch = cold
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


def test_a_bump_while_the_daemon_restarted_warm_is_anothers() -> None:
    now = [1000.0]
    epochs = Epochs(lambda: now[0])
    epochs.attached("a", 990)
    now[0] = 1010.0
    epochs.attached("b", 991)
    assert (epochs.own, epochs.daemon) == (990, 991)
    epochs.bumped("b", 992)
    epochs.heard("a", 5000)
    assert (epochs.own, epochs.daemon) == (992, 992)
    epochs.attached("c", 1011)
    assert epochs.own == 1011


def test_weights_without_an_epoch_stay_so() -> None:
    epochs = Epochs()
    epochs.use(-1)
    epochs.attached("a", 7)
    assert (epochs.own, epochs.daemon) == (-1, 7)
