"""``kvhearth remote``: what a remote holds, and the removal of old or all blocks there."""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from kvhearth.errors import KVHearthError, Reason
from kvhearth_server.cli.output import AsJson, Config, console, note, row, say_json, size, table
from kvhearth_server.config.load import load_settings
from kvhearth_server.config.value_types import parse_duration_s
from kvhearth_server.tiers.base import Done
from kvhearth_server.tiers.remote.helper.__main__ import open_driver
from kvhearth_server.tiers.remote.helper.drivers.base import Driver, Listed, Refused
from kvhearth_server.tiers.remote.names import LAYOUT, MARK_NAME, is_object_name, is_probe_name
from kvhearth_server.tiers.remote.url import RemoteUrl, parse_remote

USAGE_EPILOG = "Example: kvhearth remote usage --remote 's3://bucket/kv?region=eu-central-1'"
SWEEP_EPILOG = "Example: kvhearth remote sweep --older-than 7d --remote file:///mnt/shared/kv"
INIT_KEY_EPILOG = "Example: kvhearth remote init-key /etc/kvhearth/fleet.key"
PURGE_EPILOG = "Example: kvhearth remote purge --yes --remote file:///mnt/shared/kv"
_KEY_BYTES = 32
_PORTION = 500
_DELETE_S = 30.0
_PROBE_AGE_S = 3600.0
_T = TypeVar("_T")

Url = Annotated[
    str | None,
    typer.Option(
        "--remote",
        help="URL of the remote. Default: each one of the settings.",
        metavar="URL",
        show_default=False,
    ),
]
Space = Annotated[
    str,
    typer.Option(
        "--space",
        help="Only blocks of this space, as kvhearth remote usage names it.",
        metavar="NAME",
        show_default=False,
    ),
]


@dataclass
class Usage:
    """Sums of one space: a namespace's KV group under one weights label."""

    objects: int = 0
    bytes: int = 0
    oldest_s: float = 0.0
    newest_s: float = 0.0

    def add(self, each: Listed) -> None:
        """Count an object."""
        self.objects += 1
        self.bytes += each.size
        if each.modified_s:
            self.oldest_s = min(self.oldest_s or each.modified_s, each.modified_s)
            self.newest_s = max(self.newest_s, each.modified_s)


@dataclass
class Found:
    """Everything below a remote's prefix; ``foreign`` counts objects that no daemon made."""

    spaces: dict[str, Usage] = field(default_factory=lambda: defaultdict(Usage))
    foreign: int = 0


def _url(given: str | None, config: Any) -> RemoteUrl:
    text = given or load_settings({}, config).remote
    if not text:
        raise KVHearthError(
            Reason.CONFIG_INVALID, "name the remote: --remote URL, or remote in the settings"
        )
    return parse_remote(text)


def _run(url: RemoteUrl, work: Callable[[Driver], Coroutine[Any, Any, _T]]) -> _T:
    """Open a remote here and work on it.

    Raises:
        KVHearthError: ``daemon_away``: it cannot be opened or listed.
    """

    async def run() -> _T:
        driver = open_driver(url)
        driver.attach(memoryview(bytearray(1)))
        try:
            return await work(driver)
        finally:
            await driver.close()

    try:
        return asyncio.run(run())
    except (Refused, OSError) as error:
        raise KVHearthError(Reason.DAEMON_AWAY, f"remote: {error}") from None


async def _blocks(driver: Driver, space: str) -> AsyncIterator[list[Listed]]:
    """Return the blocks of a space, or of all; others' objects are left out."""
    async for portion in driver.list(f"{LAYOUT}/{space}"):
        found = [each for each in portion if is_object_name(each.name)]
        yield [each for each in found if not space or each.name.split("/")[1] == space]


async def _usage(driver: Driver) -> Found:
    found = Found()
    async for portion in driver.list(""):
        for each in portion:
            if is_object_name(each.name):
                found.spaces[each.name.split("/")[1]].add(each)
            elif not each.name.startswith(f"{LAYOUT}/") and each.name != MARK_NAME:
                found.foreign += 1
    return found


async def _remove(driver: Driver, names: list[str]) -> int:
    """Remove values; return how many were removed.

    Raises:
        OSError: the remote refuses or does not answer.
    """
    for start in range(0, len(names), _PORTION):
        some = names[start : start + _PORTION]
        outcomes = await driver.delete(some, time.monotonic() + _DELETE_S)
        failed = [outcome for outcome in outcomes if not isinstance(outcome, Done)]
        if failed:
            raise OSError(f"{len(failed)} of {len(some)} blocks cannot be removed: {failed[0]}")
    return len(names)


async def _sweep(driver: Driver, before_s: float, space: str) -> tuple[int, int]:
    old: list[Listed] = []
    async for portion in _blocks(driver, space):
        if any(not each.modified_s for each in portion):
            raise OSError("this remote does not tell ages; use ttl=7d in its URL instead")
        old += [each for each in portion if each.modified_s < before_s]
    probes = [
        each.name
        async for portion in driver.list(f"{LAYOUT}/")
        for each in portion
        if is_probe_name(each.name) and each.modified_s < time.time() - _PROBE_AGE_S
    ]
    await _remove(driver, probes)
    return await _remove(driver, [each.name for each in old]), sum(each.size for each in old)


async def _purge(driver: Driver, space: str) -> tuple[int, int]:
    every = [each async for portion in _blocks(driver, space) for each in portion]
    if not space:
        await _remove(driver, [MARK_NAME])
    return await _remove(driver, [each.name for each in every]), sum(each.size for each in every)


def usage(remote: Url = None, config: Config = None, as_json: AsJson = False) -> None:
    """List what a remote holds, by space. It lists every object: a request for
    each thousand.
    """
    url = _url(remote, config)
    found = _run(url, _usage)
    total = sum(each.bytes for each in found.spaces.values())
    if as_json:
        spaces = {name: vars(each) for name, each in sorted(found.spaces.items())}
        say_json({"remote": url.place, "bytes": total, "foreign": found.foreign, "spaces": spaces})
        return
    shown = table("space", "blocks", "bytes", "age of the oldest", right=("blocks", "bytes"))
    for name, each in sorted(found.spaces.items()):
        age = f"{(time.time() - each.oldest_s) / 86400:.1f} d" if each.oldest_s else "-"
        row(shown, name, str(each.objects), size(each.bytes), age)
    console().print(shown)
    note(f"{url.place}: {size(total)}; {found.foreign} objects of others")


def sweep(
    older_than: Annotated[
        str, typer.Option("--older-than", help="Least age of what is removed.", metavar="AGE")
    ],
    remote: Url = None,
    space: Space = "",
    config: Config = None,
    as_json: AsJson = False,
) -> None:
    """Remove blocks that were written longer ago, and what probes left behind.
    Others' objects stay.
    """
    try:
        age_s = parse_duration_s(older_than)
    except ValueError as error:
        raise KVHearthError(Reason.CONFIG_INVALID, f"--older-than: {error}") from None
    _report(remote, config, as_json, lambda driver: _sweep(driver, time.time() - age_s, space))


def purge(
    yes: Annotated[bool, typer.Option("--yes", help="Do it.")] = False,
    remote: Url = None,
    space: Space = "",
    config: Config = None,
    as_json: AsJson = False,
) -> None:
    """Remove all blocks of a remote, whichever host wrote them, and the mark of
    the fleet's key: the next daemon that starts makes the remote its fleet's.
    Others' objects stay.
    """
    if not yes:
        raise KVHearthError(
            Reason.CONFIG_INVALID, "this removes the blocks of all hosts; add --yes to do it"
        )
    _report(remote, config, as_json, lambda driver: _purge(driver, space))


def init_key(
    path: Annotated[Path, typer.Argument(help="File to make, for this user only.", metavar="FILE")],
    as_json: AsJson = False,
) -> None:
    """Make the secret of a fleet, once. Blocks' names at remotes are made with it,
    and hosts with the same key share blocks.
    """
    key = secrets.token_hex(_KEY_BYTES)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(key + "\n")
            file.flush()
            os.fsync(descriptor)
    except FileExistsError:
        raise KVHearthError(
            Reason.CONFIG_INVALID,
            f"{path} exists; a fleet has one key: copy it to the other hosts, and make no new one",
        ) from None
    except OSError as error:
        raise KVHearthError(
            Reason.CONFIG_INVALID,
            f"{path} cannot be made ({error.strerror}); name a file where you may write",
        ) from None
    if as_json:
        say_json({"remote_fleet_key_file": str(path.absolute())})
        return
    typer.echo(f"remote_fleet_key_file: {path.absolute()}")
    note(
        "copy this file to every host of the fleet, for the daemon's user only (0600), and keep a "
        "copy elsewhere: without it nobody finds the blocks"
    )


def _report(
    remote: str | None,
    config: Any,
    as_json: bool,
    work: Callable[[Driver], Coroutine[Any, Any, tuple[int, int]]],
) -> None:
    url = _url(remote, config)
    count, removed = _run(url, work)
    if as_json:
        say_json({"remote": url.place, "removed": count, "removed_bytes": removed})
    else:
        note(f"{url.place}: removed {count} blocks, {size(removed)}")
