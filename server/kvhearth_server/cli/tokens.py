"""``kvhearth token``: makes tokens of remote engines, and lists the identities of a file."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from kvhearth.errors import KVHearthError, Reason
from kvhearth_server.cli.output import AsJson, Config, console, note, row, say_json, table
from kvhearth_server.config.load import load_settings
from kvhearth_server.config.model import DEFAULT_TENANT_NAME
from kvhearth_server.gateway.identity import Identity
from kvhearth_server.gateway.roster import (
    add_token,
    new_token,
    parse_bounds,
    parse_role,
    read_roster,
)

NEW_EPILOG = (
    "Example: kvhearth token new --name rack7 --tenant a --bound held_bytes=64GiB "
    "--tokens-file /etc/kvhearth/tokens.yaml"
)
LS_EPILOG = "Example: kvhearth token ls --tokens-file /etc/kvhearth/tokens.yaml"

TokensFile = Annotated[
    Path | None,
    typer.Option(
        "--tokens-file",
        help="File of identities. Default: from the settings.",
        metavar="FILE",
        show_default=False,
    ),
]


def _file(given: Path | None, config: Path | None) -> Path:
    found = given or load_settings({}, config).tokens_file
    if found is None:
        raise KVHearthError(
            Reason.CONFIG_INVALID, "name the file: --tokens-file /etc/kvhearth/tokens.yaml"
        )
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
        typer.Option(
            "--bound",
            help="Bound of the identity, repeatable: sessions, connections, calls_per_s, "
            "held_bytes, held_blocks.",
            metavar="NAME=N",
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
        raise KVHearthError(Reason.CONFIG_INVALID, str(error)) from None
    token = new_token()
    add_token(path, identity, token)
    if as_json:
        say_json({"name": name, "tenant": tenant, "role": str(identity.role), "token": token})
        return
    typer.echo(token)
    note(f"kvhearth: only its hash is in {path}; the token is not shown again")


def ls(tokens_file: TokensFile = None, config: Config = None, as_json: AsJson = False) -> None:
    """List the identities of a file; it has no tokens, and hashes are not shown."""
    roster = read_roster(_file(tokens_file, config))
    if as_json:
        say_json(
            {"identities": [{"kind": kind, **asdict(identity)} for kind, identity in roster.rows]}
        )
        return
    shown = table("name", "tenant", "role", "shown by", "bounds")
    for kind, identity in roster.rows:
        bounds = [f"{name}={value}" for name, value in asdict(identity.bounds).items() if value]
        cells = (identity.name, identity.tenant, str(identity.role), kind, " ".join(bounds) or "-")
        row(shown, *cells)
    console().print(shown)
