"""One tenant takes all it can get from a real daemon; the other goes on within its quotas.

The test's own user is tenant b, the good one. Tenant a is another user: the kernel tells the daemon
the effective user of a connect. Without root only the tests within one tenant run.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.daemon import Daemon, running_daemon, until
from support.raw_door import (
    PAGE_BYTES,
    RawSession,
    end_well,
    fat_contract,
    goes_on,
    new_keys,
    raw_contract,
)
from support.ssd_kit import CONTRACT, SSD, fetch_all, saved, store_paced

from kvhearth.errors import KVHearthError, Reason
from kvhearth_lab.harness.engine import contract_of, engine_of
from kvhearth_server.cli import app

OTHER = 65534
TENANTS = f"a={OTHER}:8MiB b={os.getuid()}:8MiB"
MANY = 400
"""More sessions and namespaces than a daemon has."""
as_root = pytest.mark.skipif(os.getuid() != 0, reason="needs root to attach as another user")


@contextlib.contextmanager
def as_tenant_a(daemon: Daemon) -> Iterator[None]:
    """Connect as the user of tenant a within the block."""
    # Access to the socket is controlled by its directory.
    daemon.folder.chmod(0o755)
    daemon.socket_dir.chmod(0o755)
    os.seteuid(OTHER)
    try:
        yield
    finally:
        os.seteuid(0)


def attach_all(
    daemon: Daemon, held: contextlib.ExitStack, **changes: str
) -> tuple[int, KVHearthError]:
    """Attach as tenant a, with a contract of its own each time, until the daemon refuses."""
    for number in range(MANY):
        text = changes.get("contract") or raw_contract(model=f"m{number}").to_json()
        try:
            with as_tenant_a(daemon):
                held.enter_context(RawSession(daemon, contract=text.replace("#", str(number))))
        except KVHearthError as error:
            return number, error
    raise AssertionError("nothing bounds a tenant")


@as_root
def test_the_sessions_of_one_tenant_do_not_lock_the_other_out() -> None:
    with running_daemon(arena=False, tenants=TENANTS, sessions_max=24) as daemon:
        with contextlib.ExitStack() as held:
            count, error = attach_all(daemon, held, contract=raw_contract().to_json())
            assert (count, error.reason) == (12, Reason.TOO_MANY_SESSIONS)
            assert "sessions_max" in error.message
            with engine_of(daemon.url(), contract_of(PAGE_BYTES), "good") as engine:
                goes_on(engine)
        until(lambda: daemon.stats().sessions == 0, "all left")
        end_well(daemon)


@as_root
def test_the_contracts_of_one_tenant_do_not_lock_the_other_out() -> None:
    """Ninety contracts of 45 KiB took the whole catalogue."""
    text = json.dumps({**fat_contract(0, "\u00fc"), "draft_model": "#"})
    with running_daemon(arena=False, tenants=TENANTS) as daemon:
        with contextlib.ExitStack() as held:
            count, error = attach_all(daemon, held, contract=text)
            assert error.reason is Reason.TOO_MANY_NAMESPACES
            assert 40 < count < 60
            with engine_of(daemon.url(), contract_of(PAGE_BYTES), "good") as engine:
                goes_on(engine)
        until(lambda: daemon.stats().sessions == 0, "all left")
        end_well(daemon)


def test_engines_that_hold_their_stock_leave_room_for_others() -> None:
    """Four engines held 100 % of what may be held, and every other call was told held_cap."""
    with running_daemon(arena=False) as daemon:
        capacity = daemon.stats().segments[0].capacity_bytes
        with contextlib.ExitStack() as held:
            for _ in range(4):
                session = held.enter_context(RawSession(daemon))
                with contextlib.suppress(KVHearthError):
                    session.reserve(capacity // PAGE_BYTES)
            with engine_of(daemon.url(), contract_of(PAGE_BYTES), "good") as engine:
                goes_on(engine)
        end_well(daemon)


@as_root
def test_the_stores_of_one_tenant_leave_the_blocks_of_the_other_on_ssd(tmp_path: Path) -> None:
    """200 of 200 blocks were pushed off the drive."""
    ssd = {"ssd_dirs": [f"{tmp_path / 'log'}=80MiB"], **SSD}
    tenants = f"a={OTHER}:8MiB b={os.getuid()}:12MiB"
    with running_daemon(arena=False, memory="20MiB", tenants=tenants, **ssd) as daemon:
        with contextlib.ExitStack() as held:
            good = held.enter_context(engine_of(daemon.url(), CONTRACT, "good"))
            good.wait_ready()
            with as_tenant_a(daemon):
                flooding = held.enter_context(engine_of(daemon.url(), CONTRACT, "flood"))
                flooding.wait_ready()
            ours = new_keys(200)
            store_paced(good, daemon, ours)
            saved(daemon, len(ours))
            store_paced(flooding, daemon, new_keys(2000))
            assert daemon.stats().ssd.counters["segments_reclaimed"] > 30
            assert sorted(fetch_all(good, ours)) == sorted(ours)
            found = {each.tenant: each for each in daemon.stats().ssd.tenants}
            assert found["b"].used_bytes < found["b"].quota_bytes
            assert found["a"].used_bytes == found["a"].quota_bytes
        end_well(daemon)


# -- reload ----------------------------------------------------------------------------------------


def events(daemon: Daemon, name: str) -> list[dict[str, Any]]:
    """Return the daemon's log lines of one event."""
    found = [json.loads(line) for line in daemon.own_lines() if line.startswith("{")]
    return [line for line in found if line["event"] == name]


def hang_up(daemon: Daemon, event: str) -> dict[str, Any]:
    """Send SIGHUP and return the log line that follows it."""
    before = len(events(daemon, event))
    assert daemon.process is not None
    os.kill(daemon.process.pid, signal.SIGHUP)
    return until(lambda: events(daemon, event)[before:], event)[0]  # type: ignore[no-any-return]


def test_bounds_change_without_a_restart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "kvhearth.yaml"
    path.write_text("sessions_max: 2\nkeys_max: 100\n")
    with (
        running_daemon(arena=False, config=path) as daemon,
        RawSession(daemon) as one,
        RawSession(daemon),
    ):
        with pytest.raises(KVHearthError, match="too_many_sessions"):
            RawSession(daemon)
        path.write_text("sessions_max: 5\nkeys_max: 200\n")
        boot_id = daemon.stats().boot_id
        assert app.run(["config", "reload", "--socket-dir", str(daemon.socket_dir)]) == 0
        assert capsys.readouterr().out == "changed: sessions_max\nneed a restart: keys_max\n"
        with RawSession(daemon):
            assert daemon.stats().boot_id == boot_id
        (line,) = events(daemon, "admin.reload")
        assert (line["result"], line["changed"]) == ("done", ["sessions_max"])

        path.write_text("sessions_max: none\n")
        with pytest.raises(KVHearthError) as caught:
            daemon.operator().reload_settings()
        assert caught.value.reason is Reason.CONFIG_INVALID
        assert "sessions_max" in hang_up(daemon, "settings.not_reloaded")["reason"]

        path.write_text("sessions_max: 2\nleases_max: 7\n")
        assert hang_up(daemon, "settings.reloaded")["changed"] == ["sessions_max", "leases_max"]
        with pytest.raises(KVHearthError, match="too_many_sessions"):
            RawSession(daemon)
        assert one.lookup([]).hit_tokens == 0
