"""A tenant that takes all sessions it gets from a real daemon, and bounds that change by a reload.

The test's own user is tenant b, the good one. Tenant a is another user: the kernel tells the daemon
the effective user of a connect. ``tests/unit/test_core_tenants.py`` has the other bounds.
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from support.daemon import Daemon, running_daemon, until
from support.raw_door import (
    OTHER_UID,
    PAGE_BYTES,
    RawSession,
    as_root,
    as_user,
    end_well,
    goes_on,
)

from kvhearth.errors import KVHearthError, Reason
from kvhearth_lab.harness.engine import contract_of, engine_of
from kvhearth_server.cli import app

TENANTS = f"a={OTHER_UID}:8MiB b={os.getuid()}:8MiB"


@as_root
def test_the_sessions_of_one_tenant_do_not_lock_the_other_out() -> None:
    with running_daemon(arena=False, tenants=TENANTS, sessions_max=24) as daemon:
        with contextlib.ExitStack() as held:
            with as_user(daemon):
                for _ in range(12):
                    held.enter_context(RawSession(daemon))
                with pytest.raises(KVHearthError, match="sessions_max") as caught:
                    RawSession(daemon)
                assert caught.value.reason is Reason.TOO_MANY_SESSIONS
            with engine_of(daemon.url(), contract_of(PAGE_BYTES), "good") as engine:
                goes_on(engine)
        until(lambda: daemon.stats().sessions == 0, "all left")
        end_well(daemon)


# -- reload ----------------------------------------------------------------------------------------


def hang_up(daemon: Daemon, event: str) -> dict[str, Any]:
    """Send SIGHUP and return the log line that follows it."""
    before = len(daemon.events(event))
    assert daemon.process is not None
    os.kill(daemon.process.pid, signal.SIGHUP)
    return until(lambda: daemon.events(event)[before:], event)[0]  # type: ignore[no-any-return]


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
        (line,) = daemon.events("admin.reload")
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
