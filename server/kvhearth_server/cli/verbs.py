"""Verbs that show or change a running daemon once, and the long way of ``health``. The versions."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvhearth.contract import Contract
from kvhearth.errors import KVHearthError, Reason
from kvhearth.version import PROTOCOL_VERSION, __version__
from kvhearth_server.cli import liveness
from kvhearth_server.cli.admin_client import daemon_at, directory
from kvhearth_server.cli.liveness import printable
from kvhearth_server.cli.output import (
    AsJson,
    SocketDir,
    duration,
    facts,
    flag,
    note,
    parsed,
    percent,
    plain,
    say,
    short,
    size,
    speed,
    table,
    waiting,
    wrong,
)
from kvhearth_server.config.value_types import parse_size
from kvhearth_server.engine.miss_ratio import Curve
from kvhearth_server.engine.snapshot import Stats
from kvhearth_server.tiers.figures import TierFigures
from kvhearth_server.transport import reports

FEW_KEYS = 10_000
"""Keys looked up below which the miss-ratio curve says little."""
GAIN_LEAST = 0.02
"""Rise of the hit ratio from which more memory is recommended."""
Prefix = Annotated[
    str, typer.Argument(help="First hex digits of the namespace.", metavar="NAMESPACE")
]
_PAUSE_S = 0.2


def ls(
    namespace: Annotated[
        str, typer.Argument(help="First hex digits of a namespace.", metavar="[NAMESPACE]")
    ] = "",
    socket_dir: SocketDir = None,
    as_json: AsJson = False,
) -> None:
    """List namespaces with blocks, bytes and weights epoch; or show one with
    its contract.
    """
    daemon = daemon_at(socket_dir)
    if namespace:
        space = daemon.namespace(namespace)
        say(space, _space(space), as_json=as_json)
        return
    reply = daemon.namespaces()
    heads = ("namespace", "tenant", "model", "kv", "engines", "blocks", "bytes", "quota", "epoch")
    rows = []
    for one in reply.namespaces:
        names = (short(one.namespace), one.tenant, one.model, one.contract["kv_dtype"])
        rows.append((*names, *_counts(one).values()))
    shown = table(*heads, right=heads[4:], rows=rows) if rows else None
    empty = "there is no namespace yet: no engine has attached"
    say(reply, shown, as_json=as_json, empty=empty)


def _counts(space: reports.Namespace) -> dict[str, object]:
    """Return a namespace's counts; engines have ``ended`` if none can come any more."""
    return {
        "engines": "ended" if space.ended else space.engines,
        "blocks": space.blocks,
        "bytes": size(space.used_bytes),
        "quota": size(space.quota_bytes) if space.quota_bytes else "-",
        "epoch": space.epoch,
    }


def _space(space: reports.Namespace) -> Table:
    contract = dict(space.contract)
    groups = contract.pop("groups")
    rows = {name: getattr(space, name) for name in ("namespace", "tenant", "model")}
    rows |= _counts(space)
    rows |= {f"contract.{name}": value for name, value in sorted(contract.items())}
    for index, group in enumerate(groups):
        words = " ".join(f"{name}={value}" for name, value in sorted(group.items()))
        rows[f"contract.groups[{index}]"] = words
    return facts(rows.items())


def sessions(socket_dir: SocketDir = None, as_json: AsJson = False) -> None:
    """List attached processes, and detached ones that may still be writing."""
    reply = daemon_at(socket_dir).sessions()
    heads = ("session", "tenant", "engine", "incarnation", "role", "pid", "namespace", "state")
    rows = [_session(each) for each in reply.sessions]
    shown = table(*heads, right=("session", "incarnation", "pid"), rows=rows) if rows else None
    say(reply, shown, as_json=as_json, empty="no process is attached")


def _session(one: reports.Session) -> tuple[object, ...]:
    rank = f"rank {one.rank} of {one.world_size}" if one.rank >= 0 else ""
    role = " + ".join(filter(None, ("scheduler" if one.scheduler else "", rank)))
    engine = (one.session, one.tenant, one.engine_id, one.incarnation)
    return *engine, role, one.pid, short(one.namespace), one.state


def leases(socket_dir: SocketDir = None, as_json: AsJson = False) -> None:
    """List engines that hold leases, oldest lease first.

    Slots and bytes with several leases are counted once per lease.
    """
    reply = daemon_at(socket_dir).leases()
    heads = ("tenant", "engine", "namespace", "leases", "slots", "bytes", "oldest")
    rows = []
    for one in reply.groups:
        held = (one.leases, one.slots, size(one.bytes), duration(one.oldest_s))
        rows.append((one.tenant, one.engine_id, short(one.namespace), *held))
    shown = table(*heads, right=heads[3:], rows=rows) if rows else None
    say(reply, shown, as_json=as_json, empty="nobody holds a lease")


def pins(socket_dir: SocketDir = None, as_json: AsJson = False) -> None:
    """List pins, by which agents ask that blocks be evicted last; the one that
    ends first first.

    Blocks with several pins are counted once per pin.
    """
    reply = daemon_at(socket_dir).pins()
    heads = ("tenant", "namespace", "session", "blocks", "bytes", "ends in")
    rows = []
    for one in reply.pins:
        kept = (one.blocks, size(one.bytes), duration(one.ends_in_s))
        rows.append((one.tenant, short(one.namespace), printable(one.session), *kept))
    shown = table(*heads, right=heads[3:], rows=rows) if rows else None
    say(reply, shown, as_json=as_json, empty="nothing is pinned")


def unpin(
    namespace: Annotated[
        str, typer.Argument(help="First hex digits of the namespace.", metavar="[NAMESPACE]")
    ] = "",
    session: Annotated[
        str | None, flag("--session", "End only the pins of this agent's session.", "NAME")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="End all pins.")] = False,
    socket_dir: SocketDir = None,
    as_json: AsJson = False,
) -> None:
    """End pins before their time: those of a namespace, of a session, of both,
    or all.

    Their blocks stay, and are evicted like others. kvhearth pins lists them.
    """
    if everything == bool(namespace or session is not None):
        raise wrong("unpin takes a namespace, --session or both; or --all")
    daemon = daemon_at(socket_dir)
    with waiting("ending pins"):
        digest = daemon.namespace(namespace).namespace if namespace else None
        reply = daemon.unpin(digest, session)
    text = f"{reply.ended_pins} pins have ended"
    say(plain(reply) | {"namespace": digest, "session": session}, text, as_json=as_json)


def explain(
    what: Annotated[
        str, typer.Argument(help="File with a contract as JSON, or a key in hex.", metavar="WHAT")
    ],
    socket_dir: SocketDir = None,
    tenant: Annotated[
        str, typer.Option("--tenant", help="Tenant of the contract. Default: the first tenant.")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Explain why a lookup misses.

    For a contract: prints its namespace, or the nearest namespaces and the
    fields that differ. For a key: prints each copy, its state, and why it is
    not served. Exits with 1 if the key is absent.
    """
    path = Path(what)
    if os.path.isfile(path):
        contract = _contract(path)
        found = daemon_at(socket_dir).explain_contract(tenant, contract)
        say({"kind": "contract", **plain(found)}, _nearest(found), as_json=as_json)
        return
    try:
        key = bytes.fromhex(what)
    except ValueError:
        raise wrong(f"{what!r} is neither a file nor a key in hex") from None
    reply = daemon_at(socket_dir).explain_key(key)
    absent = f"the key {key.hex()} is absent: never stored, evicted, or stored with another hash"
    text = "\n".join(map(_place, reply.places)) or absent
    say({"kind": "key", "key": key.hex(), **plain(reply)}, text, as_json=as_json)
    if not reply.places:
        raise typer.Exit(1)


def _contract(path: Path) -> str:
    """Return a file's contract in its canonical form."""
    try:
        return Contract.from_json(path.read_text(encoding="utf-8")).to_json()
    except (OSError, UnicodeDecodeError, KVHearthError) as error:
        message = error.message if isinstance(error, KVHearthError) else str(error)
        raise wrong(f"{path}: {message}") from None


def _nearest(found: reports.ContractPlace) -> RenderableType:
    name = found.namespace
    if found.exists:
        return f"the namespace {name} exists: the contract is no reason for a miss"
    parts: list[RenderableType] = [
        f"there is no namespace {name}: no engine has attached with this contract"
    ]
    for near in found.nearest:
        rows = [(each.field, each.asked, each.stored) for each in near.fields]
        parts.append(f"\nnamespace {short(near.namespace)} differs in {len(near.fields)}:")
        parts.append(table("field", "asked", "there is", rows=rows))
    return Group(*parts)


def _place(place: reports.KeyPlace) -> str:
    verdict = f"not served: {place.why_not}" if place.why_not else "served"
    current = "current" if place.epoch == place.namespace_epoch else "stale"
    held = f"{place.leases} leases, {place.pins} pins"
    bytes_told = f"{place.shards} x {size(place.shard_bytes)}"
    return (
        f"namespace {short(place.namespace)} (tenant {place.tenant}), group {place.kv_group}: "
        f"{verdict}\n  {place.state} in {place.tier}, epoch {place.epoch} ({current}), "
        f"{bytes_told}, {held}"
    )


def stat(socket_dir: SocketDir = None, as_json: AsJson = False) -> None:
    """Show memory by segment, the SSD tier with tenants' quotas, and every
    counter since the start.
    """
    found = daemon_at(socket_dir).stats()
    parts = [_daemon(found), _segments(found)]
    if found.ssd is not None:
        parts += [_ssd(found.ssd), _directories(found.ssd), _tenants(found.ssd)]
    spaced = [each for part in parts for each in (part, "")]
    say(found, Group(*spaced, facts(sorted(found.counters.items()))), as_json=as_json)


def _daemon(found: Stats) -> Table:
    asked, hits = found.counters.get("lookup_keys", 0), found.counters.get("hit_keys", 0)
    return facts(
        [
            ("version", found.version),
            ("boot", found.boot_id),
            ("up", duration(found.uptime_s)),
            ("state", "draining" if found.draining else "serving"),
            ("blocks", found.blocks),
            ("sessions", f"{found.sessions} in {found.groups} groups"),
            ("leases", f"{found.leases}, pins {found.pins}"),
            ("hits", f"{percent(hits, asked)} of {asked} keys"),
        ]
    )


def _segments(found: Stats) -> Table:
    heads = ("segment", "pages", "bytes", "used", "free", "reserved", "held", "quarantined")
    rows = []
    for part in found.segments:
        used = percent(part.capacity_bytes - part.free_bytes, part.capacity_bytes)
        rest = (part.free_bytes, part.reserved_bytes, part.held_bytes, part.quarantined_bytes)
        sizes = (size(part.capacity_bytes), used, *map(size, rest))
        rows.append((part.tenant, part.page_kind, *sizes))
    return table(*heads, right=heads[2:], rows=rows)


def _ssd(found: TierFigures) -> Table:
    """Return a table of the tier's content and activity."""
    written, stored = found.count("written_bytes"), found.count("stored_bytes")
    state = "degraded" if found.reasons else "healthy"
    if found.recovering:
        state += f", reading back {found.files_recovered} of {found.files_found} files"
    reads = "-"  # before the first read there are only assumptions
    if found.count("loaded_blocks"):
        reads = f"{found.read_latency_s * 1e3:.2f} ms, {speed(found.read_bytes_per_s)}"
    per_byte = f", {written / stored:.2f} for each byte stored" if stored else ""
    rows = [
        ("SSD", f"{state}, by {found.interface}"),
        ("blocks on SSD", f"{found.blocks} of {size(found.live_bytes)}"),
        ("going down, up", f"{found.demoting_blocks}, {found.promoting_blocks} blocks"),
        ("requests", f"{found.queued_writes} writes, {found.queued_reads} reads"),
        ("reads take", reads),
        ("written", size(written) + per_byte),
    ]
    if found.budget_left_bytes is not None:
        rows.append(("budget left", size(max(0, found.budget_left_bytes))))
    return facts([*rows, *(("degraded", reason) for reason in found.reasons)])


def _directories(found: TierFigures) -> Table:
    heads = ("directory", "files", "of", "used", "open", "sealed", "free")
    rows = []
    for each in found.directories:
        used = percent(each.file_bytes, each.capacity_bytes)
        counts = (each.segments[name] for name in heads[4:])
        rows.append((each.path, size(each.file_bytes), size(each.capacity_bytes), used, *counts))
    return table(*heads, right=heads[1:], rows=rows)


def _tenants(found: TierFigures) -> Table:
    """Return a table with one row for each tenant's quota on SSD."""
    rows = [(one.tenant, size(one.used_bytes), size(one.quota_bytes)) for one in found.tenants]
    return table("tenant", "on SSD", "quota", right=("on SSD", "quota"), rows=rows)


def mrc(
    socket_dir: SocketDir = None,
    namespace: Annotated[
        str, typer.Option("--namespace", help="Only of namespaces that start with these digits.")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Show the hit ratio at 0.5, 1, 2 and 4 times the present memory and SSD.

    An estimate for the lookups of the last hour or so, as an LRU cache would
    have served them, from a sample of the keys (AET). Keys that nobody
    asked for before are misses at every size.
    """
    found = daemon_at(socket_dir).stats()
    curves = [each for each in found.curves if each.namespace.startswith(namespace.lower())]
    if namespace and not curves:
        known = ", ".join(each.namespace for each in found.curves) or "none"
        raise KVHearthError(
            Reason.UNKNOWN_NAMESPACE, f"no curve of a namespace {namespace!r}; there are: {known}"
        )
    asked = [each for each in curves if each.asked_keys]
    verdicts = [Text(printable(advice(each))) for each in asked if each.namespace == "all"]
    report = {"boot_id": found.boot_id, "curves": [plain(each) for each in curves]}
    text = Group(_ratios(asked), "", *verdicts) if asked else None
    say(report, text, as_json=as_json, empty="nobody has looked anything up yet")


def _ratios(curves: list[Curve]) -> Table:
    """Return a table of hit ratios: memory alone, and SSD behind the present memory."""
    rows = []
    for each in curves:
        memory = ("memory", each.memory_bytes, each.memory)
        for tier, present, ratios in (memory, ("SSD", each.ssd_bytes, each.ssd)):
            if ratios:
                names = (each.tenant, each.namespace, each.asked_keys, tier, size(present))
                rows.append((*names, *(percent(one.hit_ratio, 1) for one in ratios)))
    factors = [f"{one.factor:g} x" for one in curves[0].memory]
    heads = ("tenant", "namespace", "keys asked", "tier", "present", *factors)
    return table(*heads, right=("keys asked", "present", *factors), rows=rows)


def advice(curve: Curve) -> str:
    """Return a sentence that says whether more memory would help."""
    about = f"tenant {curve.tenant}: {curve.sampled_keys} keys tracked"
    if curve.asked_keys < FEW_KEYS:
        return f"{about}; only {curve.asked_keys} keys asked so far, too few to trust the figures"
    by_factor = {each.factor: each for each in curve.memory}
    gain = by_factor[2.0].hit_ratio - by_factor[1.0].hit_ratio
    more, loss = size(by_factor[2.0].bytes), by_factor[1.0].hit_ratio - by_factor[0.5].hit_ratio
    if gain >= GAIN_LEAST:
        return f"{about}; {more} of memory would raise the hit ratio by {100 * gain:.1f} points"
    if loss < GAIN_LEAST:
        less = size(by_factor[0.5].bytes)
        return f"{about}; memory is ample: {less} would lose {100 * max(0.0, loss):.1f} points"
    return f"{about}; memory is enough: {more} would bring {100 * max(0.0, gain):.1f} points"


def drain(
    socket_dir: SocketDir = None,
    wait_s: Annotated[
        float,
        typer.Option(
            "--wait",
            help="Wait up to this long until no lease or reservation is held.",
            metavar="SECONDS",
            min=0,
        ),
    ] = 0.0,
    as_json: AsJson = False,
) -> None:
    """Make the daemon refuse new stores and sessions, as before a shutdown;
    reads continue.

    Only a restart undoes it. With --wait it exits with 1 if sessions still hold
    something when the time is over.
    """
    end = time.monotonic() + wait_s
    daemon = daemon_at(socket_dir)
    with waiting("draining"):
        daemon.drain()
        while True:
            found = daemon.stats()
            reserved = sum(part.reserved_bytes for part in found.segments)
            held = found.leases or reserved
            if not held or time.monotonic() >= end:
                break
            time.sleep(_PAUSE_S)
    left = {"sessions": found.sessions, "leases": found.leases, "reserved_bytes": reserved}
    text = "draining: {sessions} sessions, {leases} leases and {reserved_bytes} reserved bytes"
    report = {"boot_id": found.boot_id, "draining": found.draining, **left}
    say(report, text.format(**left) + " are left", as_json=as_json)
    if wait_s and held:
        note(f"kvhearth: error: not quiet after {wait_s:g} s")
        raise typer.Exit(1)


def evict(
    namespace: Prefix,
    keep: Annotated[
        str,
        flag("--keep", "Evict until at most this much is left; 0 evicts everything.", "SIZE"),
    ],
    tier: Annotated[
        Literal["memory", "ssd", "all"] | None,
        flag(
            "--tier",
            "Tier to evict from; ssd and all need --keep 0. Default: all with --keep 0, else "
            "memory.",
        ),
    ] = None,
    socket_dir: SocketDir = None,
    as_json: AsJson = False,
) -> None:
    """Remove a namespace's blocks, coldest first, until it has at most --keep.

    Leased blocks stay; pinned ones go last, and --keep 0 ends the pins. It also
    removes the copies on SSD; they do not come back after a restart. With
    --tier memory these copies stay and are served.
    """
    keep_bytes = parsed("--keep", parse_size, keep)
    if keep_bytes and tier not in (None, "memory"):
        message = f"--tier {tier}: the SSD tier keeps all of a namespace or nothing; add --keep 0"
        raise wrong(message)
    daemon = daemon_at(socket_dir)
    with waiting("evicting"):
        space = daemon.namespace(namespace)
        reply = daemon.evict(space.namespace, keep_bytes, tier)
    text = f"{reply.evicted_blocks} blocks of {short(space.namespace)} are removed"
    text += f" from memory, {reply.ssd_blocks} from SSD" if reply.ssd_blocks else ""
    say(plain(reply) | {"namespace": space.namespace}, text, as_json=as_json)


def forget(
    namespace: Prefix,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
    label: Annotated[
        str | None,
        flag(
            "--label",
            "Name of the new weights, such as a training step, by which hosts "
            "share blocks at remotes. Default: the namespace is off the remotes.",
            "TEXT",
        ),
    ] = None,
    socket_dir: SocketDir = None,
    as_json: AsJson = False,
) -> None:
    """Make all blocks of a namespace invalid at once, in memory and on SSD,
    because its weights changed.

    Raises the namespace's weights epoch, as an engine with new weights does.
    Engines with the old weights find no block until they attach again. This
    cannot be undone. Old blocks are evicted as their memory is needed.
    """
    daemon = daemon_at(socket_dir)
    space = daemon.namespace(namespace)
    if not yes:
        _ask(space)
    reply = daemon.forget(space.namespace, space.epoch, label)
    text = f"{short(space.namespace)} is forgotten: its weights epoch is {reply.epoch} now"
    say(plain(reply) | {"namespace": space.namespace}, text, as_json=as_json)


def _ask(space: reports.Namespace) -> None:
    """Ask the operator to confirm.

    Raises:
        KVHearthError: ``config_invalid`` if there is no terminal to ask on.
        typer.Abort: the answer is no.
    """
    if not sys.stdin.isatty():
        raise wrong("forget asks on a terminal; add --yes")
    model = printable(space.model)
    message = f"{short(space.namespace)} (tenant {space.tenant}, model {model})"
    held = f"{space.blocks} blocks, {size(space.used_bytes)} in memory"
    typer.confirm(f"forget {message} with {held} and its copies on SSD?", abort=True, err=True)


def reload(socket_dir: SocketDir = None, as_json: AsJson = False) -> None:
    """Make the running daemon read its settings again, from the flags, the
    environment and the file of its start.

    Prints which settings changed and hold now, and which need a restart. With
    an invalid setting nothing changes. SIGHUP does the same.
    """
    reply = daemon_at(socket_dir).reload_settings()
    text = f"changed: {', '.join(reply.changed) or 'nothing'}"
    if reply.needs_restart:
        text += f"\nneed a restart: {', '.join(reply.needs_restart)}"
    say(reply, text, as_json=as_json)


def health(
    socket_dir: SocketDir = None,
    wait_s: Annotated[
        float, typer.Option("--wait", help="Wait up to this long.", metavar="SECONDS", min=0)
    ] = 0.0,
    as_json: AsJson = False,
) -> None:
    """Exit with 0 if the daemon serves and with 1 if it does not.

    A degraded SSD tier is a warning only: such a daemon serves. Needs no token.
    """
    raise typer.Exit(liveness.run(str(directory(socket_dir)), wait_s, as_json=as_json))


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvhearth {__version__} (protocol {PROTOCOL_VERSION})")
        raise typer.Exit


def option(
    wanted: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the versions."),
    ] = False,
) -> None:
    """Options of the command itself, before a verb."""
