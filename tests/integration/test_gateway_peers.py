"""Peers that speak for others: which users may, for which tenants, and what the log says of it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
from support.daemon import Daemon, running_daemon, until
from support.raw_door import RawSession, new_keys, raw_contract

from kvhearth.errors import KVHearthError, Reason
from kvhearth.proto.v1 import cache_pb2 as pb

OWN = os.getuid()


@pytest.fixture(scope="module")
def remote_only() -> Iterator[Daemon]:
    """A daemon whose tenants have no users, and whose own user may speak for them."""
    tenants = ["a=:8MiB", "b=:8MiB"]
    with running_daemon(arena=False, tenants=tenants, gateway_uids=[OWN]) as daemon:
        yield daemon


def refusal(daemon: Daemon, **changes: Any) -> KVHearthError:
    """Return the daemon's refusal of such a hello."""
    with pytest.raises(KVHearthError) as caught:
        RawSession(daemon, **changes)
    return caught.value


def test_a_gateway_speaks_for_tenants_without_users(remote_only: Daemon) -> None:
    """One process has sessions of two tenants and two contracts; the log names the identities."""
    other = raw_contract(model="other").to_json()
    with (
        RawSession(remote_only, tenant="a", identity="rack 1") as first,
        RawSession(remote_only, tenant="a", contract=other) as second,
        RawSession(remote_only, tenant="b", identity="rack 2") as third,
    ):
        assert len({each.welcome["namespace"] for each in (first, second, third)}) == 3
        extents = first.reserve(2)
        with pytest.raises(KVHearthError, match=r"extent|slot|reserved"):
            third.commit(new_keys(2), extents)
        third.call("BumpEpoch", pb.BumpEpochRequest(expected_epoch=third.epoch))
    until(lambda: len(remote_only.events("engine.left")) == 3, "all have left")
    for name, tenant in (("rack 1", "a"), ("rack 2", "b")):
        attached = remote_only.events("engine.attached")
        assert [each["tenant"] for each in attached if each.get("identity") == name] == [tenant]
    (bump,) = remote_only.events("engine.bumped")
    assert bump["identity"] == "rack 2"


def test_wrong_tenants_and_identities(remote_only: Daemon) -> None:
    cases: tuple[tuple[dict[str, Any], Reason, str], ...] = (
        ({"tenant": "c"}, Reason.PEER_NOT_ALLOWED, "no tenant is named 'c'"),
        ({}, Reason.PEER_NOT_ALLOWED, "no tenant is named ''"),
        ({"tenant": "a", "identity": "x\n"}, Reason.BAD_MESSAGE, "printable"),
        ({"tenant": "a", "identity": "x" * 129}, Reason.BAD_MESSAGE, "at most 128"),
    )
    for changes, reason, why in cases:
        error = refusal(remote_only, **changes)
        assert (error.reason, why in error.message) == (reason, True), error.message


def test_only_gateways_speak_for_others() -> None:
    """A tenant's own user may not name a tenant, not even its own; without settings none may."""
    with running_daemon(arena=False, tenants=[f"a={OWN}:8MiB", "b=:8MiB"]) as daemon:
        for changes in ({"tenant": "b"}, {"tenant": "a"}, {"identity": "me"}):
            error = refusal(daemon, **changes)
            assert error.reason is Reason.PEER_NOT_ALLOWED
            assert "gateway_uids" in error.message
        RawSession(daemon).close()
