"""The composition root: settings in, a running daemon out, an exit status at the end."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import gc
import os
import secrets
import signal
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from kvhearth.errors import KVHearthError, Reason
from kvhearth.url import ADMIN_TOKEN_FILE
from kvhearth_server.config import Settings
from kvhearth_server.core.state import Limits
from kvhearth_server.core.table import Geometry
from kvhearth_server.descriptors import raise_limit
from kvhearth_server.engine.background import Background
from kvhearth_server.engine.degraded import DegradedLog
from kvhearth_server.engine.engine import Engine, EngineLimits
from kvhearth_server.engine.pump import drive, written
from kvhearth_server.engine.scrub import Scrub
from kvhearth_server.engine.supervisor import Supervisor
from kvhearth_server.memory.arena import Arena, ArenaPlan, open_arena
from kvhearth_server.memory.pages import HugepagePolicy
from kvhearth_server.observability import notify
from kvhearth_server.observability.counters import Counters
from kvhearth_server.observability.logs import get_logger
from kvhearth_server.observability.progress import StartBar
from kvhearth_server.opening import follow_recovery, open_tier
from kvhearth_server.tiers.ssd.tier import SsdTier
from kvhearth_server.transport.attach import AttachServer
from kvhearth_server.transport.calls import CallsServer
from kvhearth_server.transport.decisions import Decisions
from kvhearth_server.transport.peers import Tenancy
from kvhearth_server.transport.rpc.server import RpcServer
from kvhearth_server.values import HTTP_OFF

if TYPE_CHECKING:
    from kvhearth_server.transport.web.server import WebServer

_log = get_logger("kvhearth.daemon")


def run(settings: Settings, plan: ArenaPlan | None = None) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit status.

    Args:
        settings: all that an operator can say.
        plan: an arena that settings cannot describe; by default the settings describe it.

    Raises:
        KVHearthError: what keeps the daemon from starting (memory, arena, sockets).
    """
    sys.setswitchinterval(settings.switch_interval_s)
    raise_limit(settings)
    with StartBar("populating") as progress:
        arena = open_arena(plan or _plan(settings), progress.note)
    try:
        tier = open_tier(settings, arena)
        try:
            return asyncio.run(_serve(settings, arena, tier))
        finally:
            if tier is not None:
                tier.close()
    finally:
        arena.close()


async def _serve(settings: Settings, arena: Arena, tier: SsdTier | None) -> int:
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    counters = Counters()
    engine = Engine(arena, _limits(settings), _shell(settings), counters, tier=tier)
    supervisor = Supervisor(counters)
    background = Background(
        engine, supervisor, sum_threads=settings.sum_threads, verify=settings.verify_adopted
    )
    admin_token = secrets.token_hex(32)
    decisions = Decisions(engine, background.verify_blocks)
    rpc = RpcServer(engine, decisions, admin_token)
    calls = CallsServer(engine, decisions, timeout_s=settings.attach_timeout_s)
    attach = AttachServer(engine, _tenancies(settings), timeout_s=settings.attach_timeout_s)
    web = _open_web(settings, engine, admin_token)
    _prepare_sockets(settings, admin_token)
    background.start()
    if tier is not None:
        supervisor.spawn("recovery", partial(follow_recovery, tier))
    if settings.scrub_rate:
        Scrub(engine, background.verify_blocks, settings.scrub_rate).start(supervisor)
    if engine.tiering is not None:
        degraded = DegradedLog(engine.tiering.tier.status.by_kind)
        supervisor.spawn("tiering", partial(drive, engine.tiering, degraded))
    await rpc.start(settings.grpc_socket)
    calls.start(settings.calls_socket)
    attach.start(settings.attach_socket, supervisor)
    if web is not None:
        await web.start()
    gc.freeze()  # what there is now stays: no collection goes through it again, on the loop
    _say_ready(settings, engine, web)
    _tell_systemd(supervisor)
    await stopping.wait()
    end = loop.time() + settings.drain_timeout_s
    await _drain(settings, engine, background, rpc)
    await _close(web, calls, attach)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout_at(end):
            await _settled(engine, background)  # what came while the doors were being closed
    await supervisor.stop()
    background.close()
    if engine.tiering is not None:
        if not engine.tiering.tier.drain(settings.drain_timeout_s):
            _log.warning("the SSD tier did not come to rest in time")
        engine.tiering.turn()
    for path in _files(settings):
        path.unlink(missing_ok=True)
    _log.info("stopped", boot_id=engine.boot_id)
    return 0


async def _drain(
    settings: Settings, engine: Engine, background: Background, rpc: RpcServer
) -> None:
    """No new stores or sessions; let what is committed be summed and calls in flight end, within a
    bound.
    """
    engine.drain()
    notify.notify(notify.STOPPING)
    _log.info("draining", timeout_s=settings.drain_timeout_s)
    await rpc.not_serving()
    try:
        async with asyncio.timeout(settings.drain_timeout_s):
            await _settled(engine, background)
            await rpc.stop(settings.drain_timeout_s)
    except TimeoutError:
        _log.warning("drain took too long: committed blocks without checksum are summed at restart")
        await rpc.stop(0)


async def _close(web: WebServer | None, calls: CallsServer, attach: AttachServer) -> None:
    """The doors that are open yet."""
    if web is not None:
        await web.stop()
    calls.stop()
    await attach.stop()


async def _settled(engine: Engine, background: Background) -> None:
    """Wait until what is committed has its checksum, and was written where it is to be."""
    await background.settled()
    if engine.tiering is not None:
        await written(engine.tiering)  # memory may end with the process, or the machine


def _plan(settings: Settings) -> ArenaPlan:
    tenants = [(t.name, t.bytes) for t in settings.effective_tenants(os.getuid())]
    geometry = Geometry.of(tenants, settings.slab_bytes, settings.slot_bytes_min)
    return ArenaPlan(geometry, settings.arena_dir, HugepagePolicy(settings.hugepages))


def _tenancies(settings: Settings) -> list[Tenancy]:
    return [Tenancy(t.name, t.uids) for t in settings.effective_tenants(os.getuid())]


def _limits(settings: Settings) -> Limits:
    return Limits(
        held_fraction_max=settings.held_fraction_max,
        stock_fraction_max=settings.stock_fraction_max,
        keys_max=settings.keys_max,
        sessions_max=settings.sessions_max,
        namespaces_max=settings.namespaces_max,
        leases_max=settings.leases_max,
        pins_max=settings.pins_max,
        pin_ttl_max_s=settings.pin_ttl_max_s,
        namespace_quota_bytes=settings.namespace_quota,
        eviction=settings.eviction,
    )


def _shell(settings: Settings) -> EngineLimits:
    return EngineLimits(
        message_bytes_max=settings.message_bytes_max,
        drain_grace_s=settings.drain_grace_s,
        drain_grace_no_pidfd_s=settings.drain_grace_no_pidfd_s,
    )


def _token_path(settings: Settings) -> Path:
    return settings.socket_dir / ADMIN_TOKEN_FILE


def _files(settings: Settings) -> list[Path]:
    """What a daemon makes in its socket directory."""
    sockets = [settings.attach_socket, settings.calls_socket, settings.grpc_socket]
    return [*sockets, _token_path(settings)]


def _prepare_sockets(settings: Settings, admin_token: str) -> None:
    """Make the directory, refuse a live daemon's sockets, remove a dead one's, write the admin
    token.

    Raises:
        KVHearthError: ``socket_unusable``.
    """
    folder = settings.socket_dir
    try:
        folder.mkdir(mode=0o750, parents=True, exist_ok=True)
        _lock_sockets(folder)
        for path in _files(settings):
            path.unlink(missing_ok=True)
        path = _token_path(settings)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(admin_token)
    except OSError as error:
        raise KVHearthError(
            Reason.SOCKET_UNUSABLE,
            f"cannot use {folder}: {error.strerror}; choose another --socket-dir",
        ) from None


def _open_web(settings: Settings, engine: Engine, admin_token: str) -> WebServer | None:
    """HTTP with its address taken, None where it is off; only then is it worth importing.

    Raises:
        KVHearthError: ``socket_unusable``.
    """
    if settings.http_address is None:
        return None
    from kvhearth_server.transport.web.server import WebServer

    return WebServer(settings, engine, admin_token)


def _lock_sockets(folder: Path) -> None:
    """Take the directory for as long as this process lives, so that two daemons cannot race."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise KVHearthError(
            Reason.SOCKET_UNUSABLE,
            f"another daemon serves {folder}; choose another --socket-dir",
        ) from None


def _say_ready(settings: Settings, engine: Engine, web: WebServer | None) -> None:
    for note in engine.arena.notes:
        _log.warning("arena", note=note)
    segments = engine.arena.segments
    _log.info(
        "ready",
        boot_id=engine.boot_id,
        memory_bytes=sum(segment.bytes for segment in segments),
        pages=sorted({str(segment.page_kind) for segment in segments}),
        adopted_blocks=engine.adopted_blocks,
        adopt_s=round(engine.adopt_s, 3),
        attach=str(settings.attach_socket),
        calls=str(settings.calls_socket),
        grpc=str(settings.grpc_socket),
        http=web.address if web else HTTP_OFF,
    )


def _tell_systemd(supervisor: Supervisor) -> None:
    notify.notify(notify.READY)
    if pause_s := notify.watchdog_s():
        supervisor.spawn("watchdog", lambda: notify.keep_watchdog(pause_s))
