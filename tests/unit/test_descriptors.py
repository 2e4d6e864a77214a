"""The limit on open files at the start of the daemon."""

from __future__ import annotations

import resource

import pytest

from kvhearth_server.config import rlimit as descriptors
from kvhearth_server.config.model import Settings


@pytest.mark.parametrize(("short", "reported"), [(0, False), (1, True)])
def test_a_limit_that_is_too_low_is_told_at_the_start(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
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
    descriptors.raise_limit(settings)
    assert limits == [(hard, hard)]
    assert ("descriptors.few" in capsys.readouterr().out) is reported
