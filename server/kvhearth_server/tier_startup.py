"""Opens the tiers at the daemon's start, from their settings to the SSD tier's open directories."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from kvhearth.errors import KVHearthError, Reason
from kvhearth.model import U8
from kvhearth_server.config.load import Settings
from kvhearth_server.memory.arena import Arena
from kvhearth_server.memory.mapping import HugepagePolicy, Segment
from kvhearth_server.memory.segments import create_segment
from kvhearth_server.observability.logs import StartBar, get_logger
from kvhearth_server.ownership import foreign, read_secret, unwritable
from kvhearth_server.tiers.base import DirectoryError, Tier, ask_each
from kvhearth_server.tiers.figures import TierFigures
from kvhearth_server.tiers.remote.limits import Limits
from kvhearth_server.tiers.remote.names import FLEET_KEY_BYTES_MIN
from kvhearth_server.tiers.remote.process import Mover
from kvhearth_server.tiers.remote.tier import RemoteTier
from kvhearth_server.tiers.remote.url import parse_remote
from kvhearth_server.tiers.ssd.disk.probe import ProbeResult, choose
from kvhearth_server.tiers.ssd.files import Busy, Files
from kvhearth_server.tiers.ssd.format import (
    PAGE_BYTES,
    Doubt,
    parse_directory_page,
)
from kvhearth_server.tiers.ssd.settings import SsdDirectorySpec, SsdSettings
from kvhearth_server.tiers.ssd.superblock import SUPERBLOCK_NAME, other_version
from kvhearth_server.tiers.ssd.tier import Environment, SsdTier
from kvhearth_server.tiers.ssd.write_limits import SeenTwice

Probe = Callable[[str, int], ProbeResult]
"""Function that tries an interface for disk I/O at a queue depth."""

_LOOK_S = 0.1
_TELL_S = 5.0
FLEET_KEY_BYTES_MAX = 4096
LEAVING_BYTES = 32 << 20
"""Size of the buffer through which hot blocks that the SSD tier drops are published."""
_log = get_logger("kvhearth.ssd")
_remote_log = get_logger("kvhearth.remote")


OpenTiers = Callable[[Settings, Arena], list[Tier]]


def open_tiers(
    settings: Settings, arena: Arena, environment: Environment | None = None
) -> list[Tier]:
    """Open the tiers of these settings, the SSD tier first, the remote last.

    Args:
        environment: as for ``SsdTier``; fault injection passes its own.

    Raises:
        KVHearthError: a tier cannot be opened.
    """
    regions = [segment.view for segment in arena.segments]
    publishes = bool(settings.remote) and settings.remote_write != "never"
    buffer = _leaving_buffer() if publishes and settings.ssd_dirs else None
    if buffer is not None:
        regions.append(buffer.view)
    opened: list[Tier] = []
    with contextlib.ExitStack() as undo:
        if settings.ssd_dirs:
            opened.append(_open_ssd(settings, regions, environment, offers=buffer is not None))
            undo.callback(opened[-1].close)
        if settings.remote:
            opened.append(open_remote(settings, arena, buffer))
            undo.callback(opened[-1].close)
        undo.pop_all()
    return opened


def _leaving_buffer() -> Segment | None:
    """Return memory through which blocks that the SSD tier drops are published; None without room
    for it.
    """
    try:
        return create_segment(LEAVING_BYTES, HugepagePolicy.PREFER)
    except KVHearthError as error:
        _remote_log.warning("remote.no_buffer", reason=error.message)
        return None


def open_remote(settings: Settings, arena: Arena, buffer: Segment | None = None) -> RemoteTier:
    """Open the remote of these settings, with its helper process; see ``open_tiers``.

    Args:
        buffer: memory beside the arena from which blocks are published, too.
    """
    key = fleet_key(settings)
    segments = [*arena.segments, *([buffer] if buffer is not None else [])]
    url = parse_remote(settings.remote)
    mover = Mover(
        url,
        key,
        segments,
        settings.remote_staging,
        log_level=settings.log_level,
        log_format=settings.log_format,
    )
    _remote_log.info("remote.opened", remote=url.place)
    regions = [segment.view for segment in segments]
    tier = RemoteTier(mover, regions, url.place, key, remote_limits(settings))
    tier.life_s = url.ttl_s
    tier.buffer_bytes = buffer.bytes if buffer is not None else 0
    return tier


def fleet_key(settings: Settings) -> bytes:
    """Return the fleet's secret; empty without remotes.

    Raises:
        KVHearthError: ``config_invalid``: there is no file, it cannot be read, is not private, or
            is too short.
    """
    path = settings.remote_fleet_key_file
    if path is None:
        if not settings.remote:
            return b""
        raise KVHearthError(
            Reason.CONFIG_INVALID,
            "remote: needs the fleet's key, of which the blocks' names are made: on one host run "
            "kvhearth remote init-key FILE, copy FILE to all hosts of the fleet, and give it as "
            "--remote-fleet-key-file",
        )
    try:
        found = read_secret(path, FLEET_KEY_BYTES_MAX).strip()
    except OSError as error:
        raise KVHearthError(
            Reason.CONFIG_INVALID,
            f"remote_fleet_key_file: {path} cannot be used ({error.strerror}); copy the fleet's "
            "key there from another host, for the daemon's user only (0600), or make the first one "
            "with: kvhearth remote init-key FILE",
        ) from None
    if len(found) < FLEET_KEY_BYTES_MIN:
        raise KVHearthError(
            Reason.CONFIG_INVALID,
            f"remote_fleet_key_file: {path} has {len(found)} bytes, too few for a secret; make "
            "one with: kvhearth remote init-key FILE",
        )
    return found


def remote_limits(settings: Settings) -> Limits:
    """Return the bounds of what is published to a remote."""
    return Limits(
        settings.remote_bytes_per_s, settings.remote_bytes_per_day, settings.remote_requests_per_s
    )


def _open_ssd(
    settings: Settings, regions: Sequence[U8], environment: Environment | None, *, offers: bool
) -> SsdTier:
    """Open the SSD tier of these settings.

    It makes directories where their parent exists. A directory that cannot be used makes the tier
    degraded. The log is read back from now on, at each ``poll``; ``follow_recovery`` reports its
    progress.

    Raises:
        KVHearthError: ``ssd_unusable`` if no directory or no kind of disk I/O can be used,
            ``config_invalid`` if two names stand for one directory.
    """
    unmade = _ask_all([each.path for each in settings.ssd_dirs], _make)
    for message in unmade.values():
        _log.warning("ssd.directory_not_made", reason=message)
    if len(unmade) == len(settings.ssd_dirs):
        raise KVHearthError(Reason.SSD_UNUSABLE, "; ".join(unmade.values()))
    try:
        tier = SsdTier(
            tier_settings(settings),
            regions,
            admission=SeenTwice() if settings.ssd_admission == "seen_twice" else None,
            environment=environment,
            offers=offers,
        )
    except DirectoryError as error:
        raise KVHearthError(Reason.SSD_UNUSABLE, str(error)) from None
    except OSError as error:
        raise _no_interface(settings, error) from None
    _log.info(
        "ssd.opened",
        directories=[str(each) for each in settings.ssd_dirs],
        interface=tier.interface,
        not_working={each.name: each.reason for each in tier.probe_results if each.reason},
        segment_files=tier.figures().files_found,
    )
    for directory in tier.log.directories:
        for message in directory.repairs:
            _log.warning("ssd.directory_mended", what=message)
    return tier


def tier_settings(settings: Settings) -> SsdSettings:
    """Return the tier's own settings.

    Raises:
        KVHearthError: ``config_invalid``: two names stand for one directory.
    """
    places = [SsdDirectorySpec(each.path, settings.ssd_room(each)) for each in settings.ssd_dirs]
    try:
        return SsdSettings(
            places=tuple(places),
            segment_bytes=settings.ssd_segment_bytes,
            interface=settings.ssd_interface,
            depth=settings.ssd_depth,
            flush=settings.ssd_flush,
            sum_threads=settings.sum_threads,
            prewrite=settings.ssd_prewrite,
            bytes_per_day=settings.ssd_bytes_per_day,
            quotas=settings.ssd_quotas(),
        )
    except ValueError as error:
        raise KVHearthError(Reason.CONFIG_INVALID, f"ssd_dirs: {error}; check --ssd-dir") from None


async def follow_recovery(tier: SsdTier) -> None:
    """Report the progress of reading back the log: a bar on a terminal, a log line now and then."""
    began = reported_at = time.monotonic()
    with StartBar("reading back") as bar:
        while tier.recovering:
            now = tier.figures()
            bar.note("SSD log files", now.files_recovered, max(1, now.files_found))
            if time.monotonic() - reported_at >= _TELL_S:
                reported_at = time.monotonic()
                _log.info("ssd.reading_back", **_progress(now))
            await asyncio.sleep(_LOOK_S)
    took = round(time.monotonic() - began, 3)
    now = tier.figures()
    dropped = {n: c for n, c in now.counters.items() if n.startswith("dropped_")}
    _log.info("ssd.read_back", seconds=took, **_progress(now), **dropped)
    missing = now.files_found - now.files_recovered - now.locked_files
    if missing > 0:
        _log.error("ssd.files_not_read", files=missing, message="their blocks are lost")


def _progress(now: TierFigures) -> dict[str, int]:
    blocks = now.count("recovered_blocks")
    return {"files": now.files_recovered, "of": now.files_found, "blocks": blocks}


def check_ssd_dirs(settings: Settings) -> None:
    """Refuse directories of which none can be used; make nothing.

    Raises:
        KVHearthError: ``ssd_unusable``, ``config_invalid``.
    """
    paths = [each.path for each in settings.ssd_dirs]
    if not paths:
        return
    unusable = _ask_all(paths, unusable_ssd_dir)
    if len(unusable) == len(paths):
        raise KVHearthError(Reason.SSD_UNUSABLE, "; ".join(unusable.values()))
    tier_settings(settings)


def check_ssd_interface(settings: Settings, tried: Probe) -> None:
    """Refuse an interface for disk I/O that does not work here.

    Raises:
        KVHearthError: ``ssd_unusable``.
    """
    if not settings.ssd_dirs:
        return
    try:
        choose(settings.ssd_interface, settings.ssd_depth, tried)
    except OSError as error:
        raise _no_interface(settings, error) from None


def unusable_ssd_dir(path: Path) -> str:
    """Return the reason why a directory of the SSD tier cannot be used; empty if there is none."""
    if not os.path.isdir(path):
        return _unmakeable(path)
    head = path / SUPERBLOCK_NAME
    try:
        if message := foreign(path):
            return f"cannot use {path} ({message}); name a directory of the daemon's own"
        lock = Files().open(head)
    except FileNotFoundError:
        problem = unwritable(path)
        if not problem or any(path.glob("*.segment")):
            return ""
        return f"cannot use {path} ({problem}); name a directory for the daemon"
    except Busy:
        return f"{path} is used by another daemon; stop it, or give this one another"
    except OSError as error:
        return f"cannot use {path} ({error.strerror}); name a directory for the daemon"
    try:
        page = head.read_bytes()[:PAGE_BYTES]
    except OSError:
        page = b""  # the tier makes the file again
    finally:
        os.close(lock.fd)
    if parse_directory_page(page) is Doubt.VERSION:
        return other_version(head)
    return ""


def _unmakeable(path: Path) -> str:
    """Return the reason why the directory cannot be made; empty if there is none."""
    try:
        path.stat()
        return f"--ssd-dir {path} is a file; name a directory"
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:
        return _not_made(path, error.strerror)
    if not path.parent.is_dir():
        return (
            f"--ssd-dir {path}: {path.parent} does not exist; mount the drive there, or create it"
        )
    problem = unwritable(path.parent)
    return _not_made(path, problem) if problem else ""


def _not_made(path: Path, why: str | None) -> str:
    return f"--ssd-dir {path} cannot be made ({why}); name a directory where the daemon may write"


def _no_interface(settings: Settings, error: OSError) -> KVHearthError:
    return KVHearthError(
        Reason.SSD_UNUSABLE,
        f"no disk I/O with --ssd-interface {settings.ssd_interface} ({error.strerror}); use "
        "auto, and see kvhearth doctor",
    )


def _ask_all(paths: list[Path], ask: Callable[[Path], str]) -> dict[Path, str]:
    """Return the answers of ``ask`` that are not empty; a hanging drive delays them briefly."""
    found = ask_each(paths, ask, SsdSettings.open_s)
    return {
        path: f"--ssd-dir {said}" if isinstance(said, DirectoryError) else said
        for path, said in found.items()
        if said
    }


def _make(path: Path) -> str:
    """Make a directory if it is missing; return the reason why it cannot be made, or "" if it
    exists now.

    A drive that is frozen for writing blocks every attempt to make something, even if it exists.
    """
    try:
        if not path.is_dir():
            path.mkdir(mode=0o700, exist_ok=True)
    except (FileNotFoundError, FileExistsError):
        return _unmakeable(path)
    except OSError as error:
        return _not_made(path, error.strerror)
    return ""
