"""The limit on open files at the start of the daemon."""

from __future__ import annotations

import resource

import pytest
from structlog.testing import capture_logs
from support.cases import cases

from kvhearth.errors import KVHearthError
from kvhearth_server.config import rlimit as descriptors
from kvhearth_server.config.model import Settings


@pytest.mark.usefixtures("restored_logging")
@pytest.mark.parametrize(("short", "reported"), [(0, False), (1, True)])
def test_a_limit_that_is_too_low_is_told_at_the_start(
    monkeypatch: pytest.MonkeyPatch,
    short: int,
    *,
    reported: bool,
) -> None:
    settings = Settings(**{"ssd_dirs": ["/mnt/a=4GiB", "/mnt/b=400GiB"], "sessions_max": 10})
    assert descriptors.ssd_files(settings) > 500
    hard = descriptors.needed(settings) - short
    limits = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, pair: limits.append(pair))
    with capture_logs() as logged:
        descriptors.raise_limit(settings)
    assert limits == [(hard, hard)]
    assert ("descriptors.few" in {line["event"] for line in logged}) is reported


def test_a_limit_below_the_daemons_own_files_is_refused_with_the_remedy() -> None:
    least = descriptors.RESERVE + 64
    descriptors.check_limit(Settings(), least)
    with pytest.raises(KVHearthError, match=f"needs {least} at least; systemd: LimitNOFILE="):
        descriptors.check_limit(Settings(), least - 1)


@cases("sessions_max", [1, 4, 256, 65536])
@cases("limit", [512, 1024, 4096, 65536, 1 << 20])
def test_the_shares_leave_the_reserve(sessions_max: int, limit: int) -> None:
    settings = Settings(sessions_max=sessions_max)
    shares = descriptors.door_shares(settings, limit)
    taken = shares.attach + shares.calls + shares.grpc + shares.http
    assert taken <= limit - descriptors.RESERVE
    assert min(shares.attach, shares.calls, shares.calls_fair, shares.grpc, shares.http) > 0


@cases("sessions_max", [1, 4, 256, 4096])
def test_the_limit_that_is_needed_serves_all_sessions(sessions_max: int) -> None:
    settings = Settings(sessions_max=sessions_max)
    shares = descriptors.door_shares(settings, descriptors.needed(settings))
    assert shares.attach >= 2 * sessions_max
    assert shares.calls >= 2 * sessions_max
    assert shares.grpc >= sessions_max
