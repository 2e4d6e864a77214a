"""Engines on other hosts: ``kvhearth gateway`` serves them beside a daemon that runs already, and
``kvhearth token`` makes and lists their identities.
"""

from __future__ import annotations

import asyncio
import signal
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from kvhearth_server.cli.config import with_flags
from kvhearth_server.cli.output import AsJson, Config, flag, note, say, table, wrong
from kvhearth_server.config.load import load_settings
from kvhearth_server.config.model import DEFAULT_TENANT_NAME
from kvhearth_server.gateway.credentials import Credentials
from kvhearth_server.gateway.process import SETTINGS, GatewayProcess
from kvhearth_server.gateway.tokens import (
    Identity,
    add_token,
    new_token,
    parse_bounds,
    parse_role,
    read_identities,
)
from kvhearth_server.observability import logs

LISTEN_DEFAULT = "127.0.0.1:9461"


@with_flags(SETTINGS)
def gateway(config: Config = None, **flags: object) -> None:
    """Serve engines on other hosts until SIGTERM or SIGINT.

    The gateway is one more client of the daemon at --socket-dir. With tokens
    or certificates, its user must be in the daemon's gateway_uids. kvhearth
    serve --listen starts and watches one itself. SIGHUP reads certificates
    and tokens again.
    """
    settings = load_settings(flags, config)
    if settings.listen_address is None:
        settings = load_settings(flags | {"listen": LISTEN_DEFAULT}, config)
    logs.configure(settings.log_level, settings.log_format)
    logs.capture()
    Credentials(settings)  # wrong certificates and tokens end this start, not the process's
    asyncio.run(_run(GatewayProcess(settings, lambda: None)))


async def _run(process: GatewayProcess) -> None:
    loop = asyncio.get_running_loop()
    work = loop.create_task(process.run())
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, work.cancel)
    loop.add_signal_handler(signal.SIGHUP, process.hangup)
    try:
        await work
    except asyncio.CancelledError:
        return


_IDENTITIES = "File of identities. Default: from the settings."
TokensFile = Annotated[Path | None, flag("--tokens-file", _IDENTITIES, "FILE")]


def _file(given: Path | None, config: Path | None) -> Path:
    found = given or load_settings({}, config).tokens_file
    if found is None:
        raise wrong("name the file: --tokens-file /etc/kvhearth/tokens.yaml")
    return found.expanduser().absolute()


def new(
    name: Annotated[str, typer.Option("--name", help="Name of the identity, for the log.")],
    tenant: Annotated[
        str, typer.Option("--tenant", help="Tenant whose blocks it uses.")
    ] = DEFAULT_TENANT_NAME,
    role: Annotated[
        str,
        typer.Option("--role", help="engine stores and loads, operator also uses the HTTP."),
    ] = "engine",
    bound: Annotated[
        list[str] | None,
        flag(
            "--bound",
            "Bound of the identity, repeatable: sessions, connections, calls_per_s, "
            "held_bytes, held_blocks.",
            "NAME=N",
        ),
    ] = None,
    tokens_file: TokensFile = None,
    config: Config = None,
    as_json: AsJson = False,
) -> None:
    """Make a random token, print it once, and append its hash to the file.

    The daemon and its gateways know it after a SIGHUP or kvhearth config reload.
    """
    path = _file(tokens_file, config)
    try:
        pairs = [each.partition("=")[::2] for each in bound or []]
        identity = Identity(name, tenant, parse_role(role), parse_bounds(dict(pairs)))
    except ValueError as error:
        raise wrong(str(error)) from None
    token = new_token()
    add_token(path, identity, token)
    report = {"name": name, "tenant": tenant, "role": str(identity.role), "token": token}
    say(report, token, as_json=as_json)
    if not as_json:
        note(f"kvhearth: only its hash is in {path}; the token is not shown again")


def ls(tokens_file: TokensFile = None, config: Config = None, as_json: AsJson = False) -> None:
    """List the identities of a file; it has no tokens, and hashes are not shown."""
    rows, found = [], []
    for (kind, _), identity in read_identities(_file(tokens_file, config)).items():
        facts = asdict(identity)
        found.append({"kind": kind, **facts})
        bounds = " ".join(f"{name}={value}" for name, value in facts["bounds"].items() if value)
        rows.append((identity.name, identity.tenant, str(identity.role), kind, bounds or "-"))
    shown = table("name", "tenant", "role", "shown by", "bounds", rows=rows)
    say({"identities": found}, shown, as_json=as_json)
