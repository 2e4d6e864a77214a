"""Messages that systemd receives, and cases in which it receives none."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path

import pytest

from kvhearth_lab.harness import HUNG_S
from kvhearth_server.observability import systemd as notify


@pytest.fixture(autouse=True)
def _no_systemd(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("abstract", [False, True])
def test_a_state_is_one_datagram(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, abstract: bool
) -> None:
    name = f"@kvhearth-test-{os.getpid()}" if abstract else str(tmp_path / "n")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(name.replace("@", "\0", 1) if abstract else name)
        systemd.settimeout(HUNG_S)
        monkeypatch.setenv("NOTIFY_SOCKET", name)
        assert notify.notify(notify.READY)
        assert systemd.recv(100) == b"READY=1"


def test_without_systemd_nothing_happens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not notify.notify(notify.READY)
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "nobody"))
    assert not notify.notify(notify.READY)


def test_the_watchdog_is_fed_twice_in_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    assert notify.watchdog_s() == 0
    monkeypatch.setenv("WATCHDOG_USEC", "3000000")
    assert notify.watchdog_s() == 1.5
    monkeypatch.setenv("WATCHDOG_PID", str(os.getpid() + 1))
    assert notify.watchdog_s() == 0


def test_the_watchdog_is_fed_again_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "n"))
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "n"))
        systemd.setblocking(False)

        async def fed() -> None:
            feeding = asyncio.create_task(notify.keep_watchdog(0.01, lambda: True))
            loop = asyncio.get_running_loop()
            for _ in range(3):
                assert await asyncio.wait_for(loop.sock_recv(systemd, 100), 20) == b"WATCHDOG=1"
            feeding.cancel()

        asyncio.run(fed())
