"""The composition root: builds the daemon from its settings, runs it, and returns its exit
status.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import ssl
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

from kvhearth.errors import KVHearthError, Reason
from kvhearth.url import (
    ADMIN_SOCKET,
    ADMIN_TOKEN_FILE,
    ATTACH_SOCKET,
    CALLS_SOCKET,
    GRPC_SOCKET,
)
from kvhearth_server.config.load import Settings, merged_settings
from kvhearth_server.config.rlimit import door_shares, raise_limit
from kvhearth_server.core.publishing import PublishPolicy
from kvhearth_server.core.state import Limits
from kvhearth_server.doors import OpenDoors, SocketDirectory, refusal
from kvhearth_server.engine.checksums import ChecksumWorkers
from kvhearth_server.engine.engine import Engine, EngineLimits, Reloaded
from kvhearth_server.engine.populating import populate
from kvhearth_server.engine.supervisor import Supervisor, collect_when_idle, spare_survivors
from kvhearth_server.engine.tiering.manager import DegradedLog, drive, written
from kvhearth_server.engine.token_store import TokenStore
from kvhearth_server.gateway.credentials import Credentials
from kvhearth_server.gateway.process import GatewayProcess
from kvhearth_server.memory.arena import Arena, open_arena
from kvhearth_server.memory.mapping import FilesystemKind, filesystem_kind
from kvhearth_server.memory.plan import ArenaPlan
from kvhearth_server.observability import logs
from kvhearth_server.observability import systemd as notify
from kvhearth_server.observability.counters import Counters, watch_lag
from kvhearth_server.observability.logs import get_logger
from kvhearth_server.observability.metrics import COUNTERS
from kvhearth_server.preflight import (
    arena_plan,
    check,
    read_token,
    socket_files,
)
from kvhearth_server.tier_startup import OpenTiers, follow_recovery, open_tiers, remote_limits
from kvhearth_server.tiers.base import Tier
from kvhearth_server.tiers.remote.tier import RemoteTier
from kvhearth_server.tiers.ssd.tier import SsdTier
from kvhearth_server.transport.attach import Admission, AttachServer, Tenancy
from kvhearth_server.transport.dispatch import Dispatcher
from kvhearth_server.transport.frames import CallsServer
from kvhearth_server.transport.operators import Operators
from kvhearth_server.transport.reports import Examine
from kvhearth_server.transport.rpc import RpcServer
from kvhearth_server.transport.web.routes import make_app
from kvhearth_server.transport.web.server import WebServer

_SUMMED = (
    *("lookups", "hit_keys", "below_keys", "miss_keys", "stored_blocks", "evicted_blocks"),
    *("demoted_blocks", "promoted_blocks", "sessions_opened", "refusals", "checksum_failures"),
)
"""Counters that the last log line of a run shows."""
_TRIM_PAUSE_S = 0.25
_RELOAD_S = 10.0
_log = get_logger("kvhearth.daemon")


def run(
    settings: Settings,
    plan: ArenaPlan | None = None,
    opener: OpenTiers | None = None,
    again: Callable[[], Settings] | None = None,
    examine: Examine = list,
) -> int:
    """Serve until SIGTERM or SIGINT; return the exit status.

    Args:
        settings: the operator's settings.
        plan: an arena that settings cannot describe; by default the settings describe it.
        opener: opens the tiers; fault injection passes its own.
        again: reads the settings again, from the sources of the start; by default they stay.
        examine: finds what could be better on this machine, for the page; called on a thread.

    Raises:
        KVHearthError: the error that keeps the daemon from starting (memory, arena, sockets).
    """
    signal.signal(signal.SIGHUP, _tell_hangup)
    sys.setswitchinterval(settings.switch_interval_s)
    raise_limit(settings)
    check(settings)
    arena = open_arena(plan or arena_plan(settings))
    try:
        tiers = (opener or open_tiers)(settings, arena)
        try:
            read = again or (lambda: settings)
            return asyncio.run(_serve(settings, arena, tiers, read, examine))
        finally:
            for tier in tiers:
                tier.close()
    finally:
        arena.close()


def _tell_hangup(_: int, __: FrameType | None) -> None:
    """Log and ignore a SIGHUP before or after the daemon serves: dying of it would cost the
    cache.
    """
    _log.warning("daemon.hangup", message="SIGHUP reloads nothing now: the daemon does not serve")


class Reloader:
    """Reads the settings again and applies those that may change while the daemon serves.

    Args:
        settings: those in force.
        again: reads them again; may wait for a file.
        engine: serves under them.
        credentials: identities and certificates, which are read again, too.
        gateway: its process reads its own again, too.
    """

    def __init__(
        self,
        settings: Settings,
        again: Callable[[], Settings],
        engine: Engine,
        credentials: Credentials | None = None,
        gateway: GatewayProcess | None = None,
    ) -> None:
        self._settings, self._again, self._engine = settings, again, engine
        self._credentials, self._gateway = credentials, gateway
        self._busy = asyncio.Lock()
        self._hung_up = asyncio.Event()

    def hangup(self) -> None:
        """Take note of a SIGHUP; several before the next reload are one."""
        _log.warning("daemon.hangup", message="SIGHUP: the settings are read again")
        self._hung_up.set()

    async def follow(self) -> None:
        """Reload after each SIGHUP, for as long as the task lives."""
        while True:
            await self._hung_up.wait()
            self._hung_up.clear()
            with contextlib.suppress(KVHearthError):  # it is in the log
                await self.reload()

    async def reload(self) -> Reloaded:
        """Read the settings and apply the changes, all or none.

        Raises:
            KVHearthError: ``config_invalid``; everything stays as it was.
        """
        async with self._busy:
            try:
                done = await self._reload()
            except KVHearthError as error:
                _log.error("settings.not_reloaded", reason=error.message)
                raise
        _log.info("settings.reloaded", changed=done.changed, needs_restart=done.needs_restart)
        return done

    async def _reload(self) -> Reloaded:
        try:
            async with asyncio.timeout(_RELOAD_S):
                read = await asyncio.to_thread(self._again)
        except TimeoutError:
            message = f"the settings could not be read within {_RELOAD_S:g} s; try again"
            raise KVHearthError(Reason.CONFIG_INVALID, message) from None
        if self._credentials is not None:
            await asyncio.to_thread(self._credentials.reload)  # a broken file is in the log
        if self._gateway is not None:
            self._gateway.hangup()
        new, changed, restart = merged_settings(self._settings, read)
        raise_limit(new)
        budget = new.ssd_bytes_per_day if "ssd_bytes_per_day" in changed else None
        self._engine.use(_limits(new), budget)
        self._use_remotes(new, changed)
        if "log_level" in changed:
            logs.configure(new.log_level, new.log_format)
        self._settings = new
        return Reloaded(changed, restart)

    def _use_remotes(self, new: Settings, changed: Sequence[str]) -> None:
        """Apply the remotes' bounds if they changed, since new ones begin with full buckets, what
        is published, and what the files of their secrets say.
        """
        tiering = self._engine.tiering
        if tiering is not None and "remote_write" in changed:
            tiering.use_policy(PublishPolicy(new.remote_write))
        bounds = any(name.startswith("remote_") and name != "remote_write" for name in changed)
        for tier in self._engine.tiers:
            if isinstance(tier, RemoteTier):
                tier.reopen()
                if bounds:
                    tier.use_limits(remote_limits(new))


def _open_engine(settings: Settings, arena: Arena, tiers: Sequence[Tier]) -> Engine:
    counters = Counters(COUNTERS)
    bounds = _named(settings, EngineLimits)
    shell = EngineLimits(**bounds | {"remote_write": PublishPolicy(settings.remote_write)})
    tokens = TokenStore(*_tokens_place(settings, arena), counters)
    engine = Engine(arena, _limits(settings), shell, counters, tiers=tiers, tokens=tokens)
    if settings.shared_index:
        engine.share_index()
    return engine


def _tokens_place(settings: Settings, arena: Arena) -> tuple[Path | None, int]:
    """Return a directory whose files live as long as blocks do, None if none live on, and the bytes
    for tokens there.
    """
    if settings.ssd_token_bytes:
        return settings.ssd_dirs[0].path, settings.ssd_token_bytes
    folder = arena.plan.folder if arena.durable else None
    if folder is not None and filesystem_kind(folder).kind is FilesystemKind.HUGETLBFS:
        folder = settings.socket_dir  # nobody can write to a file on hugetlbfs
    return folder, settings.event_tokens


async def _serve(
    settings: Settings,
    arena: Arena,
    tiers: Sequence[Tier],
    again: Callable[[], Settings],
    examine: Examine,
) -> int:
    loop = asyncio.get_running_loop()
    stopping = _stop_signal(loop)
    engine = _open_engine(settings, arena, tiers)
    supervisor = Supervisor(engine.counters)
    admin_token = secrets.token_hex(32)
    operators = _operators(settings, admin_token)
    gateway = _open_gateway(settings, engine, supervisor)
    reloader = Reloader(settings, again, engine, operators.credentials, gateway)
    _follow_hangups(reloader, engine, supervisor)
    background = ChecksumWorkers(engine, supervisor, sum_threads=settings.sum_threads)
    dispatcher = Dispatcher(engine, background.verify_blocks)
    shares = door_shares(settings)
    rpc = RpcServer(engine, dispatcher, shares.grpc)
    calls = CallsServer(engine, dispatcher, shares, timeout_s=settings.attach_timeout_s)
    attach = AttachServer(
        engine,
        _admission(settings),
        timeout_s=settings.attach_timeout_s,
        descriptors_max=shares.attach,
    )
    web = _open_web(settings, engine, operators, shares.http, examine)
    directory = _claimed(settings)
    background.start()
    _spawn(settings, engine, background, supervisor)
    doors = OpenDoors(
        engine,
        directory,
        {
            "admin_token": (ADMIN_TOKEN_FILE, partial(_write_token, admin_token)),
            **({"grpc": (GRPC_SOCKET, rpc.start)} if settings.grpc == "on" else {}),
            "admin": (ADMIN_SOCKET, partial(web.open, supervisor)),
            "calls": (CALLS_SOCKET, partial(calls.start, supervisor)),
            "attach": (ATTACH_SOCKET, partial(attach.start, supervisor)),
        },
    )
    await doors.open()
    supervisor.spawn("files", partial(doors.run, stopping))
    web.start(supervisor)
    _spare_the_loop()
    _say_ready(settings, engine, web)
    _tell_systemd(engine, supervisor)
    cause = await stopping
    end = loop.time() + settings.drain_timeout_s
    _log.info("daemon.draining", cause=cause, timeout_s=settings.drain_timeout_s)
    await _drain(settings, engine, background, rpc)
    await _close(web, calls, attach)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout_at(end):
            await _settled(engine, background)  # calls made while the sockets closed
    loop.remove_signal_handler(signal.SIGHUP)
    signal.signal(signal.SIGHUP, _tell_hangup)  # the loop leaves the default, which is to die
    await supervisor.stop()
    background.close()
    _rest_tier(engine, settings.drain_timeout_s)
    doors.close()
    directory.leave()
    _log.info("daemon.stopped", **_summary(engine))
    return 0


def _open_gateway(
    settings: Settings, engine: Engine, supervisor: Supervisor
) -> GatewayProcess | None:
    """Listen for engines on other hosts and start the gateway, if the settings say so. Engines are
    refused until the daemon serves.
    """
    if settings.listen_address is None:
        return None
    gateway = GatewayProcess(settings, lambda: engine.counters.add("gateway_restarts"))
    engine.describe_gateway = gateway.describe
    supervisor.spawn("gateway", gateway.run)
    return gateway


def _stop_signal(loop: asyncio.AbstractEventLoop) -> asyncio.Future[str]:
    """Return a future of the name of the signal that ends the daemon."""
    found: asyncio.Future[str] = loop.create_future()

    def stop(name: str) -> None:
        if not found.done():
            found.set_result(name)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop, number.name)
    return found


def _follow_hangups(reloader: Reloader, engine: Engine, supervisor: Supervisor) -> None:
    """Reload the settings at each SIGHUP, and when an operator asks for it."""
    engine.reload = reloader.reload
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reloader.hangup)
    supervisor.spawn("reload", reloader.follow)


def _summary(engine: Engine) -> dict[str, object]:
    """Return the run's counters for its last log line."""
    counts = {name: engine.counters.get(name) for name in _SUMMED}
    uptime_s = round(engine.now() - engine.started_at, 3)
    return {"boot_id": engine.boot_id, "uptime_s": uptime_s, **counts}


def _spare_the_loop() -> None:
    """Do work now that calls would otherwise wait for later."""
    np.unique(np.zeros(0))  # its first call imports modules for 15 ms or more
    spare_survivors()


def _rest_tier(engine: Engine, timeout_s: float) -> None:
    """Bring the SSD tier and the writers of its catalogue and of tokens to rest."""
    if engine.tiering is not None:
        if not engine.tiering.tier.drain(timeout_s):
            _log.warning("ssd.not_at_rest")
        engine.tiering.turn()
    engine.ssd_catalogue.close()
    engine.tokens.close()


async def _drain(
    settings: Settings, engine: Engine, background: ChecksumWorkers, rpc: RpcServer
) -> None:
    """Refuse new stores and sessions; let committed blocks get their checksums and calls in flight
    end, within a time limit.
    """
    engine.drain()
    notify.notify(notify.STOPPING)
    try:
        async with asyncio.timeout(settings.drain_timeout_s):
            await _settled(engine, background)
            await rpc.stop(settings.drain_timeout_s)
    except TimeoutError:
        _log.warning("daemon.drain_timeout", hint="blocks without checksum are summed at restart")
        await rpc.stop(0)


async def _close(web: WebServer, calls: CallsServer, attach: AttachServer) -> None:
    """Close the sockets that are still open."""
    await web.stop()
    calls.stop()
    await attach.stop()


async def _settled(engine: Engine, background: ChecksumWorkers) -> None:
    """Wait until every committed block has its checksum and is written back if it is to be."""
    await background.settled()
    if engine.tiering is not None:
        await written(engine.tiering)  # memory may end with the process, or the machine


def _spawn(
    settings: Settings, engine: Engine, background: ChecksumWorkers, supervisor: Supervisor
) -> None:
    """Start the optional tasks that the settings enable."""
    for tier in engine.tiers:
        if isinstance(tier, SsdTier):
            supervisor.spawn("recovery", partial(follow_recovery, tier))
    supervisor.spawn("tokens", partial(engine.tokens.run, engine.gone))
    supervisor.spawn("populate", partial(populate, engine))
    supervisor.spawn("miss_ratios", engine.miss_ratios.run)
    if engine.tiering is not None:
        degraded = DegradedLog(engine.tiering.tier.problems)
        supervisor.spawn("tiering", partial(drive, engine.tiering, degraded))
    if engine.durable:
        supervisor.spawn("catalogue", engine.catalogue.run)

    def calls() -> int:
        return engine.core.state.clock

    supervisor.spawn("lag", partial(watch_lag, engine.timings.loop_lag, calls))
    supervisor.spawn("watch", engine.watch.run)
    supervisor.spawn("garbage", partial(collect_when_idle, calls))
    if not engine.arena.trim():
        supervisor.spawn("trim", partial(_trim, engine))


async def _trim(engine: Engine) -> None:
    """Give back memory of a larger arena once no client of an earlier run maps it."""
    while not engine.arena.trim([each.lock_byte for each in engine.sessions if not each.ghost]):
        await asyncio.sleep(_TRIM_PAUSE_S)
    engine.write_catalogue()  # the next run may give the arena more memory again
    _log.info("arena.trimmed")


def _admission(settings: Settings) -> Admission:
    own = os.getuid()
    tenancies = [Tenancy(t.name, t.uids) for t in settings.effective_tenants(own)]
    return Admission(tenancies, settings.effective_gateway_uids(own))


def _limits(settings: Settings) -> Limits:
    quota = settings.namespace_quota
    return Limits(**_named(settings, Limits), namespace_quota_bytes=quota)


def _named(settings: Settings, kind: type[Any]) -> dict[str, Any]:
    """Return the settings that have the names of a dataclass's fields."""
    return settings.model_dump(include={each.name for each in fields(kind)})


def _operators(settings: Settings, admin_token: str) -> Operators:
    credentials = Credentials(settings) if settings.tokens_file else None
    return Operators(admin_token, read_token(settings), credentials, guarded=settings.http_guarded)


def _claimed(settings: Settings) -> SocketDirectory:
    """Return the sockets' directory, made, checked and locked, without a dead daemon's files.

    Raises:
        KVHearthError: ``socket_unusable``.
    """
    directory = SocketDirectory(settings.socket_dir)
    try:
        directory.claim()
        for path in socket_files(settings):
            (directory / path.name).unlink(missing_ok=True)
    except OSError as error:
        raise refusal(settings.socket_dir, error) from None
    return directory


def _write_token(admin_token: str, path: Path) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(admin_token)


def _open_web(
    settings: Settings,
    engine: Engine,
    operators: Operators,
    connections_max: int,
    examine: Examine,
) -> WebServer:
    """Bind the HTTP address, if there is one, and return the server.

    Raises:
        KVHearthError: ``socket_unusable``.
    """
    credentials = operators.credentials

    def tls() -> ssl.SSLContext | None:
        if credentials is None or not settings.http_guarded:
            return None
        return credentials.web_context

    def crowded() -> None:
        engine.counters.add("connections_refused", 1, "http")

    app = make_app(engine, settings, operators, examine)
    return WebServer(app, settings.http_address, connections_max, crowded, tls)


def _say_ready(settings: Settings, engine: Engine, web: WebServer) -> None:
    if reason := settings.arena_fallback:
        engine.notices["memory"] = reason
        _log.warning("arena.anonymous", reason=reason)
    for note in engine.arena.notes:
        _log.warning("arena.note", note=note)
    segments = engine.arena.segments
    _log.info(
        "ready",
        boot_id=engine.boot_id,
        memory_bytes=sum(segment.bytes for segment in segments),
        pages=sorted({str(segment.page_kind) for segment in segments}),
        huge_bytes=sum(segment.huge_bytes for segment in segments),
        numa_nodes=engine.arena.populator.nodes,
        adopted_blocks=engine.adopted_blocks,
        adopt_s=round(engine.adopt_s, 3),
        attach=str(settings.attach_socket),
        calls=str(settings.calls_socket),
        grpc=str(settings.grpc_socket) if settings.grpc == "on" else settings.grpc,
        admin=str(settings.admin_socket),
        http=web.address,
    )


def _tell_systemd(engine: Engine, supervisor: Supervisor) -> None:
    notify.notify(notify.READY)
    if pause_s := notify.watchdog_s():
        lives = partial(notify.keep_watchdog, pause_s, lambda: not engine.needs_restart)
        supervisor.spawn("watchdog", lives)
