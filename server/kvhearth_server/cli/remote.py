"""``kvhearth remote``: what a remote holds, and the removal of old or all blocks there."""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from kvhearth.errors import KVHearthError, Reason
from kvhearth_server.cli.output import AsJson, Config, flag, note, parsed, say, size, table, wrong
from kvhearth_server.config.load import load_settings
from kvhearth_server.config.value_types import parse_duration_s
from kvhearth_server.ownership import sync_directory
from kvhearth_server.tiers.base import Done
from kvhearth_server.tiers.remote.helper.__main__ import open_driver
from kvhearth_server.tiers.remote.helper.drivers.base import Driver, Listed, Refused
from kvhearth_server.tiers.remote.names import LAYOUT, MARK_NAME, is_object_name, is_probe_name
from kvhearth_server.tiers.remote.url import RemoteUrl, parse_remote

_KEY_BYTES = 32
_PORTION = 500
_DELETE_S = 30.0
_TELL_S = 5.0
_PROBE_AGE_S = 3600.0
_T = TypeVar("_T")

_NAME = "URL of the remote. Default: the one of the settings."
Url = Annotated[str | None, flag("--remote", _NAME, "URL")]
_SPACE = "Only blocks of this space, as kvhearth remote usage names it."
Space = Annotated[str, flag("--space", _SPACE, "NAME")]


@dataclass
class Usage:
    """Sums of some blocks, such as those of one space."""

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


def _url(given: str | None, config: Any) -> RemoteUrl:
    text = given or load_settings({}, config).remote
    if not text:
        raise wrong("name the remote: --remote URL, or remote in the settings")
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


def _is_block(each: Listed, space: str) -> bool:
    """Whether an object is a block of a space, or of any for ""."""
    return is_object_name(each.name) and space in ("", each.name.split("/")[1])


async def _usage(driver: Driver) -> tuple[dict[str, Usage], int]:
    """Return the spaces, and the number of objects that no daemon made."""
    spaces, foreign = defaultdict[str, Usage](Usage), 0
    async for each in _listed(driver, ""):
        if _is_block(each, ""):
            spaces[each.name.split("/")[1]].add(each)
        elif not each.name.startswith(f"{LAYOUT}/") and each.name != MARK_NAME:
            foreign += 1
    return dict(sorted(spaces.items())), foreign


async def _listed(driver: Driver, prefix: str) -> AsyncIterator[Listed]:
    """Yield what a remote lists; tell now and then how far that is."""
    count, told_at = 0, time.monotonic()
    async for portion in driver.list(prefix):
        for each in portion:
            yield each
        count += len(portion)
        if time.monotonic() - told_at >= _TELL_S:
            told_at = time.monotonic()
            note(f"{count} objects so far")


async def _remove(driver: Driver, prefix: str, chosen: Callable[[Listed], bool]) -> Usage:
    """Remove the blocks and probes that ``chosen`` names, while they are listed; return the sums of
    the blocks.

    Raises:
        OSError: the remote refuses or does not answer.
    """
    removed, waiting = Usage(), list[str]()
    async for each in _listed(driver, prefix):
        if chosen(each):
            waiting.append(each.name)
            if not is_probe_name(each.name):
                removed.add(each)
        if len(waiting) == _PORTION:
            await _delete(driver, waiting)
            waiting.clear()
    await _delete(driver, waiting)
    return removed


async def _delete(driver: Driver, names: list[str]) -> None:
    outcomes = await driver.delete(names, time.monotonic() + _DELETE_S) if names else []
    failed = [outcome for outcome in outcomes if not isinstance(outcome, Done)]
    if failed:
        raise OSError(f"{len(failed)} of {len(names)} objects cannot be removed: {failed[0]}")


async def _sweep(driver: Driver, before_s: float, space: str) -> Usage:
    def is_old(each: Listed) -> bool:
        if is_probe_name(each.name):
            return each.modified_s < time.time() - _PROBE_AGE_S
        if not _is_block(each, space):
            return False
        if not each.modified_s:
            raise OSError("this remote does not tell ages; use ttl=7d in its URL instead")
        return each.modified_s < before_s

    return await _remove(driver, f"{LAYOUT}/", is_old)


async def _purge(driver: Driver, space: str) -> Usage:
    if not space:
        await _delete(driver, [MARK_NAME])
    return await _remove(driver, f"{LAYOUT}/{space}", lambda each: _is_block(each, space))


def usage(remote: Url = None, config: Config = None, as_json: AsJson = False) -> None:
    """List what a remote holds, by space. It lists every object: a request for
    each thousand.
    """
    url = _url(remote, config)
    spaces, foreign = _run(url, _usage)
    total = sum(each.bytes for each in spaces.values())
    rows = []
    for name, each in spaces.items():
        age = f"{(time.time() - each.oldest_s) / 86400:.1f} d" if each.oldest_s else "-"
        rows.append((name, each.objects, size(each.bytes), age))
    heads = ("space", "blocks", "bytes", "age of the oldest")
    report = {"remote": url.place, "bytes": total, "foreign": foreign}
    report |= {"spaces": {name: vars(each) for name, each in spaces.items()}}
    say(report, table(*heads, right=heads[1:3], rows=rows), as_json=as_json)
    if not as_json:
        note(f"{url.place}: {size(total)}; {foreign} objects of others")


def sweep(
    older_than: Annotated[str, flag("--older-than", "Least age of what is removed.", "AGE")],
    remote: Url = None,
    space: Space = "",
    config: Config = None,
    as_json: AsJson = False,
) -> None:
    """Remove blocks that were written longer ago, and what probes left behind.
    Others' objects stay.
    """
    before_s = time.time() - parsed("--older-than", parse_duration_s, older_than)
    _removed(remote, config, as_json, lambda driver: _sweep(driver, before_s, space))


def purge(
    yes: Annotated[bool, flag("--yes", "Do it.")] = False,
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
        raise wrong("this removes the blocks of all hosts; add --yes to do it")
    _removed(remote, config, as_json, lambda driver: _purge(driver, space))


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
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(key + "\n")
            file.flush()
            os.fsync(descriptor)
        sync_directory(path.absolute().parent)
    except FileExistsError:
        message = "exists; a fleet has one key: copy it to the other hosts, and make no new one"
        raise wrong(f"{path} {message}") from None
    except OSError as error:
        message = f"cannot be made ({error.strerror}); name a file where you may write"
        raise wrong(f"{path} {message}") from None
    report = {"remote_fleet_key_file": str(path.absolute())}
    say(report, f"remote_fleet_key_file: {path.absolute()}", as_json=as_json)
    if not as_json:
        note(
            "copy this file to every host of the fleet, for the daemon's user only (0600), and "
            "keep a copy elsewhere: without it nobody finds the blocks"
        )


def _removed(
    remote: str | None,
    config: Any,
    as_json: bool,
    work: Callable[[Driver], Coroutine[Any, Any, Usage]],
) -> None:
    """Do a removal at a remote and report it."""
    url = _url(remote, config)
    removed = _run(url, work)
    report = {"remote": url.place, "removed": removed.objects, "removed_bytes": removed.bytes}
    text = f"{url.place}: removed {removed.objects} blocks, {size(removed.bytes)}"
    say(report, None, as_json=as_json, empty=text)
