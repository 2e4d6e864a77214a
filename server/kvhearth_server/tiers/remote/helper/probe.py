"""Probe of a remote: create, read, compare, delete, and the mark of the fleet's key."""

from __future__ import annotations

import asyncio
import secrets
import time

from kvhearth_server.tiers.base import Done, Failed, Failure, Missing, Outcome
from kvhearth_server.tiers.remote.helper.drivers.base import Driver, Refused
from kvhearth_server.tiers.remote.names import MARK_NAME, fleet_mark, probe_name

PROBE_S = 5.0
_BYTES = 4096
_FIXES = {
    Failure.DENIED: (
        "refuses access: check that the bucket exists, the secret, its rights to read, write and "
        "delete, and this host's clock"
    ),
    Failure.TIMEOUT: "does not answer in time; check the network and the server",
    Failure.UNREACHABLE: "cannot be reached; check the address, the network and the server",
    Failure.NO_SPACE: "is full",
}


class Unavailable(Exception):
    """The remote does not answer; requests may be tried all the same."""


async def probe(driver: Driver, place: str, fleet_key: bytes) -> None:
    """Write, read and remove a value, and compare the fleet's mark with ours.

    Args:
        place: the remote, for messages.

    Raises:
        Refused: the remote must not be used before somebody has done as the text says.
        Unavailable: the remote does not answer or fails.
    """
    name, value = probe_name(), secrets.token_bytes(_BYTES)
    _check(await _put(driver, name, value), place, "a write")
    try:
        found = await _get(driver, name, _BYTES)
        if isinstance(found, memoryview) and found != value:
            raise Refused(f"{place} returns other bytes than were written; use another server")
        if isinstance(found, Missing):
            raise Refused(
                f"{place} does not find what was just written: check that the bucket exists and "
                "that the server keeps values"
            )
        if not isinstance(found, memoryview):
            _check(found, place, "a read")
    finally:
        removed = await driver.delete([name], _soon())
    _check(removed[0], place, "a removal")
    await _mark(driver, place, fleet_mark(fleet_key))


async def _mark(driver: Driver, place: str, ours: bytes) -> None:
    found = await _get(driver, MARK_NAME, len(ours))
    if isinstance(found, Missing):
        _check(await _put(driver, MARK_NAME, ours), place, "a write")
        found = await _get(driver, MARK_NAME, len(ours))
    if isinstance(found, memoryview) and found == ours:
        return
    if isinstance(found, Failed):
        _check(found, place, "a read")
    raise Refused(
        f"{place} belongs to a fleet with another key: copy that fleet's key file to this host, or "
        "give the URL another prefix (if its key is lost, its blocks are, too: kvhearth remote "
        "purge --yes removes them and the key's mark)"
    )


async def _put(driver: Driver, name: str, value: bytes) -> Outcome:
    (found,) = await asyncio.to_thread(driver.put, [name], [memoryview(value)], _soon())
    return found


async def _get(driver: Driver, name: str, size: int) -> memoryview | Outcome:
    into = memoryview(bytearray(size))
    (found,) = await asyncio.to_thread(driver.get, [name], [into], _soon())
    return found


def _soon() -> float:
    return time.monotonic() + PROBE_S


def _check(outcome: Outcome, place: str, what: str) -> None:
    if isinstance(outcome, Done):
        return
    reason = outcome.reason if isinstance(outcome, Failed) else None
    if reason is Failure.DENIED:
        raise Refused(f"{place} {_FIXES[reason]} ({what} failed)")
    if isinstance(outcome, Missing):
        raise Refused(f"{place} has no such bucket or directory; make it or correct the URL")
    text = _FIXES.get(reason, "fails") if reason is not None else "fails"
    raise Unavailable(f"{place} {text} ({what} failed)")
