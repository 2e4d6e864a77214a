"""Verbs that show one thing each: ``ls``, ``sessions``, ``leases``, ``explain``. The versions."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Group

from kvhearth.contract import Contract
from kvhearth.errors import KVHearthError, Reason
from kvhearth.version import PROTOCOL_VERSION, __version__
from kvhearth_server.cli.admin_client import daemon_at
from kvhearth_server.cli.output import (
    AsJson,
    SocketDir,
    console,
    duration,
    facts,
    note,
    plain,
    row,
    say_json,
    short,
    size,
    table,
)
from kvhearth_server.transport import reports

LS_EPILOG = "Example: kvhearth ls 3f9c --json | jq .contract"


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
        _show_one(daemon.namespace(namespace), as_json=as_json)
        return
    reply = daemon.namespaces()
    if as_json:
        say_json(plain(reply))
        return
    if not reply.namespaces:
        note("there is no namespace yet: no engine has attached")
        return
    heads = ("namespace", "tenant", "model", "kv", "engines", "blocks", "bytes", "quota", "epoch")
    shown = table(*heads, right=heads[4:])
    for space in reply.namespaces:
        quota = size(space.quota_bytes) if space.quota_bytes else "-"
        counts = (
            _engines(space),
            str(space.blocks),
            size(space.used_bytes),
            quota,
            str(space.epoch),
        )
        names = (short(space.namespace), space.tenant, space.model, space.contract["kv_dtype"])
        row(shown, *names, *counts)
    console().print(shown)


def _show_one(space: reports.Namespace, *, as_json: bool) -> None:
    if as_json:
        say_json(plain(space))
        return
    contract = dict(space.contract)
    groups = contract.pop("groups")
    rows: list[tuple[str, object]] = [
        ("namespace", space.namespace),
        ("tenant", space.tenant),
        ("engines", _engines(space)),
        ("model", space.model),
        ("blocks", space.blocks),
        ("bytes", size(space.used_bytes)),
        ("quota", size(space.quota_bytes) if space.quota_bytes else "-"),
        ("epoch", space.epoch),
        *((f"contract.{name}", value) for name, value in sorted(contract.items())),
    ]
    for index, group in enumerate(groups):
        words = " ".join(f"{name}={value}" for name, value in sorted(group.items()))
        rows.append((f"contract.groups[{index}]", words))
    console().print(facts(rows))


def _engines(space: reports.Namespace) -> str:
    """Return the number of engines, or that nobody can come any more."""
    return "ended" if space.ended else str(space.engines)


SESSIONS_EPILOG = "Example: kvhearth sessions --json | jq '.sessions[].pid'"


def sessions(socket_dir: SocketDir = None, as_json: AsJson = False) -> None:
    """List attached processes, and detached ones that may still be writing."""
    reply = daemon_at(socket_dir).sessions()
    if as_json:
        say_json(plain(reply))
        return
    if not reply.sessions:
        note("no process is attached")
        return
    heads = ("session", "tenant", "engine", "incarnation", "role", "pid", "namespace", "state")
    shown = table(*heads, right=("session", "incarnation", "pid"))
    for one in reply.sessions:
        rank = f"rank {one.rank} of {one.world_size}" if one.rank >= 0 else ""
        role = " + ".join(filter(None, ("scheduler" if one.scheduler else "", rank)))
        numbers = (str(one.session), one.tenant, one.engine_id, str(one.incarnation))
        row(shown, *numbers, role, str(one.pid), short(one.namespace), one.state)
    console().print(shown)


LEASES_EPILOG = "Example: kvhearth leases --json | jq '.groups[] | select(.oldest_s > 60)'"


def leases(socket_dir: SocketDir = None, as_json: AsJson = False) -> None:
    """List engines that hold leases, oldest lease first.

    Slots and bytes with several leases are counted once per lease.
    """
    reply = daemon_at(socket_dir).leases()
    if as_json:
        say_json(plain(reply))
        return
    if not reply.groups:
        note("nobody holds a lease")
        return
    heads = ("tenant", "engine", "namespace", "leases", "slots", "bytes", "oldest")
    shown = table(*heads, right=heads[3:])
    for one in reply.groups:
        counts = (str(one.leases), str(one.slots), size(one.bytes), duration(one.oldest_s))
        row(shown, one.tenant, one.engine_id, short(one.namespace), *counts)
    console().print(shown)


EXPLAIN_EPILOG = (
    "Example: kvhearth explain contract.json; kvhearth explain 9f86d081884c7d659a2feaa0c55ad015"
)


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
    if path.is_file():
        _contract(path, socket_dir, tenant, as_json=as_json)
        return
    try:
        key = bytes.fromhex(what)
    except ValueError:
        raise KVHearthError(
            Reason.CONFIG_INVALID, f"{what!r} is neither a file nor a key in hex"
        ) from None
    _key(key, socket_dir, as_json=as_json)


def _contract(path: Path, socket_dir: Path | None, tenant: str, *, as_json: bool) -> None:
    try:
        text = Contract.from_json(path.read_text(encoding="utf-8")).to_json()
    except (OSError, UnicodeDecodeError, KVHearthError) as error:
        message = error.message if isinstance(error, KVHearthError) else str(error)
        raise KVHearthError(Reason.CONFIG_INVALID, f"{path}: {message}") from None
    reply = daemon_at(socket_dir).explain_contract(tenant, text)
    if as_json:
        say_json({"kind": "contract", **plain(reply)})
        return
    if reply.exists:
        typer.echo(f"the namespace {reply.namespace} exists: the contract is no reason for a miss")
        return
    typer.echo(
        f"there is no namespace {reply.namespace}: no engine has attached with this contract"
    )
    for near in reply.nearest:
        shown = table("field", "asked", "there is")
        for field in near.fields:
            row(shown, field.field, field.asked, field.stored)
        title = f"\nnamespace {short(near.namespace)} differs in {len(near.fields)}:"
        console().print(Group(title, shown))


def _key(key: bytes, socket_dir: Path | None, *, as_json: bool) -> None:
    reply = daemon_at(socket_dir).explain_key(key)
    if as_json:
        say_json({"kind": "key", "key": key.hex(), **plain(reply)})
    elif not reply.places:
        typer.echo(
            f"the key {key.hex()} is absent: never stored, evicted, or stored with another hash"
        )
    else:
        for place in reply.places:
            console().print(_place(place))
    if not reply.places:
        raise typer.Exit(1)


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
