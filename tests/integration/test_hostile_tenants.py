"""One tenant takes all it can get from a real daemon; the other goes on within its floor.

The test's own user is tenant b, the good one. Tenant a is another user: the kernel tells the daemon
the effective user of a connect. Without root only the tests within one tenant run.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator

import pytest
from support.daemon import Daemon, running_daemon, until
from support.raw_door import (
    PAGE_BYTES,
    RawSession,
    end_well,
    fat_contract,
    goes_on,
    raw_contract,
)

from kvhearth.errors import KVHearthError, Reason
from kvhearth_lab.harness.engine import contract_of, engine_of

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
            assert (count, error.reason) == (18, Reason.SHARE_EXCEEDED)
            assert "tenant_shares" in error.message
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
            assert error.reason is Reason.SHARE_EXCEEDED
            assert 50 < count < 90
            with engine_of(daemon.url(), contract_of(PAGE_BYTES), "good") as engine:
                goes_on(engine)
        until(lambda: daemon.stats().sessions == 0, "all left")
        end_well(daemon)


def test_engines_that_hold_their_stock_leave_room_for_others() -> None:
    """Four engines held 100 % of what may be held, and every other call was told held_cap."""
    with running_daemon(arena=False) as daemon:
        capacity = daemon.stats().segments[0].bytes
        with contextlib.ExitStack() as held:
            for _ in range(4):
                session = held.enter_context(RawSession(daemon))
                with contextlib.suppress(KVHearthError):
                    session.reserve(capacity // PAGE_BYTES)
            with engine_of(daemon.url(), contract_of(PAGE_BYTES), "good") as engine:
                goes_on(engine)
        end_well(daemon)
