"""``kvhearth config``: the settings in force, a commented sample, a check, and a reload."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvhearth.errors import KVHearthError, Reason
from kvhearth_server.cli.admin_client import AdminClient
from kvhearth_server.cli.output import AsJson, Config, SocketDir, note, plain, say_json
from kvhearth_server.cli.sample import sample as sample_text
from kvhearth_server.cli.sample import settings_yaml
from kvhearth_server.config.load import Settings, load_settings, unread_environment

SHOW_EPILOG = "Example: KVHEARTH_MEMORY=64GiB kvhearth config show"
SAMPLE_EPILOG = "Example: kvhearth config sample > kvhearth.yaml"
RELOAD_EPILOG = "Example: kvhearth config validate kvhearth.yaml && kvhearth config reload"
VALIDATE_EPILOG = "Example: kvhearth config validate kvhearth.yaml"


def show(config: Config = None, as_json: AsJson = False) -> None:
    """Print the settings from environment and file as YAML; secrets are masked."""
    settings = load_settings({}, config)
    if as_json:
        say_json(settings.model_dump(mode="json"))
    else:
        typer.echo(settings_yaml(settings), nl=False)


def sample(as_json: AsJson = False) -> None:
    """Print a commented YAML file of all settings with their defaults."""
    if as_json:
        fields = Settings.model_fields.items()
        defaults = Settings.model_validate({}).model_dump(mode="json")
        say_json(
            {name: {"default": defaults[name], "help": field.description} for name, field in fields}
        )
    else:
        typer.echo(sample_text(), nl=False)


def validate(
    file: Annotated[
        Path | None,
        typer.Argument(help="YAML file of settings; same as --config.", metavar="[FILE]"),
    ] = None,
    config: Config = None,
    as_json: AsJson = False,
) -> None:
    """Check the settings from environment and file; exit with 2 if they are
    invalid.
    """
    if file is not None and config is not None:
        raise KVHearthError(Reason.CONFIG_INVALID, f"{file} and --config {config}: name one file")
    problem = ""
    try:
        load_settings({}, file or config)
    except KVHearthError as error:
        problem = error.message
    unread = unread_environment()
    if as_json:
        say_json({"valid": not problem, "problem": problem, "unread_environment": unread})
    for name in unread:
        note(f"kvhearth: warning: no setting reads the environment variable {name}")
    if problem:
        raise KVHearthError(Reason.CONFIG_INVALID, problem)
    if not as_json:
        typer.echo("valid")


def reload(socket_dir: SocketDir = None, as_json: AsJson = False) -> None:
    """Make the running daemon read its settings again, from the flags, the
    environment and the file of its start.

    Prints which settings changed and hold now, and which need a restart. With
    an invalid setting nothing changes. SIGHUP does the same.
    """
    with AdminClient(socket_dir) as daemon:
        reply = daemon.reload_settings()
    if as_json:
        say_json(plain(reply))
        return
    typer.echo(f"changed: {', '.join(reply.changed) or 'nothing'}")
    if reply.needs_restart:
        typer.echo(f"need a restart: {', '.join(reply.needs_restart)}")
