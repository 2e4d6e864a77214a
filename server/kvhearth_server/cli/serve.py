"""``kvhearth serve``: derives its flags from ``Settings``; they are written nowhere else."""

from __future__ import annotations

import inspect
import os
import typing
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic.fields import FieldInfo

from kvhearth.version import __version__
from kvhearth_server.cli.panels import panel_of
from kvhearth_server.config.load import Settings, Shown, flag_of, load_settings, unread_environment
from kvhearth_server.config.value_types import format_size
from kvhearth_server.observability import logs

EPILOG = (
    "Example: kvhearth serve --memory 64GiB --hugepages=require "
    "--arena-dir /dev/hugepages/kvhearth --socket-dir /run/kvhearth"
)

_CONFIG_HELP = "YAML file of settings (environment: KVHEARTH_CONFIG)."


def _help(field: FieldInfo) -> str:
    """Return the description with the default as it would be written."""
    if field.default in (None, (), ""):
        return field.description or ""
    shown = next((item for item in field.metadata if isinstance(item, Shown)), None)
    default = shown.format(field.default) if shown else str(field.default).lower()
    return f"{field.description} (default {default})"


def metavar(field: FieldInfo) -> str:
    """Return the placeholder of a setting's value."""
    shown = next((item for item in field.metadata if isinstance(item, Shown)), None)
    if shown is not None:
        return shown.metavar
    if typing.get_origin(field.annotation) is typing.Literal:
        return "|".join(typing.get_args(field.annotation))
    if Path in (field.annotation, *typing.get_args(field.annotation)):
        return "DIR"
    if field.annotation is int:
        return "N"
    bounded = any(hasattr(item, "le") or hasattr(item, "lt") for item in field.metadata)
    return "FRACTION" if bounded else "NUMBER"


def _flag(name: str, field: FieldInfo) -> inspect.Parameter:
    """Return one flag. Its value stays text (or a list of texts), which the model parses."""
    kebab = flag_of(name)
    kind: Any = str | None
    if field.annotation is bool:
        kind = bool | None
        kebab += "/--no-" + kebab[2:]
    elif typing.get_origin(field.annotation) is tuple:
        kind = list[str] | None
    option = typer.Option(
        kebab,
        help=_help(field),
        metavar=None if field.annotation is bool else metavar(field),
        show_default=False,  # Settings has it; here every flag is unset until given
        rich_help_panel=panel_of(name, list(Settings.model_fields)),
    )
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, option]
    )


def with_flags_of(
    model: type[Settings], names: Collection[str] | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a function of ``(config, **flags)`` one typed parameter for each field of ``model``, or
    for those of ``names``.
    """

    def wrap(function: Callable[..., None]) -> Callable[..., None]:
        config = inspect.Parameter(
            "config",
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[
                Path | None, typer.Option("--config", help=_CONFIG_HELP, metavar="FILE")
            ],
        )
        own = [
            each.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for each in inspect.signature(function, eval_str=True).parameters.values()
            if each.name != "config" and each.kind is not inspect.Parameter.VAR_KEYWORD
        ]
        flags = [
            _flag(name, field)
            for name, field in model.model_fields.items()
            if names is None or name in names
        ]
        parameters = [config, *own, *flags]
        function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        function.__annotations__ = {each.name: each.annotation for each in parameters}
        return function

    return wrap


def given(flags: dict[str, object]) -> dict[str, object]:
    """Return the flags that were written on the command line."""
    return {name: value for name, value in flags.items() if value is not None and value != []}


def prepare(config: Path | None, flags: dict[str, object]) -> Settings:
    """Load the settings of this start, and set up logging by them.

    Args:
        config: the YAML file, if one was named.
        flags: by field name; ``None`` and an empty list stand for a flag that was not given.

    Raises:
        KVHearthError: ``CONFIG_INVALID``.
    """
    settings = load_settings(given(flags), config)
    logs.configure(settings.log_level, settings.log_format)
    logs.capture()
    log = logs.get_logger("kvhearth.serve")
    log.info(
        "daemon.starting",
        version=__version__,
        pid=os.getpid(),
        memory=format_size(settings.memory),
        ssd_dirs=len(settings.ssd_dirs),
    )
    log.debug("daemon.settings", **settings.model_dump(mode="json"))
    for name, asked, used in settings.rounded():
        log.info("memory.rounded", of=name, asked_bytes=asked, used_bytes=used)
    for name in unread_environment():
        log.warning("environment.unread", variable=name)
    return settings


@with_flags_of(Settings)
def serve(context: typer.Context, config: Path | None = None, **flags: object) -> None:
    """Run the daemon in the foreground until SIGTERM or SIGINT.

    A flag overrides the environment, which overrides the YAML file, which
    overrides the default: --slab-bytes is KVHEARTH_SLAB_BYTES in the
    environment and slab_bytes in the file. Sizes are written 65536, 512MiB,
    64Gi or 64GiB (1024s), 64G or 64GB (1000s); durations 0.5, 500ms, 30s or
    24h.
    """
    settings = prepare(config, flags)
    # Imported after the settings, so that a mistake in them is reported without the time to load
    # gRPC.
    from kvhearth_server import daemon

    def again() -> Settings:
        return load_settings(given(flags), config)

    def examine() -> list[dict[str, str]]:
        from kvhearth_server.cli import doctor

        return doctor.worse_than_ok(settings)

    raise typer.Exit(daemon.run(settings, opener=context.obj, again=again, examine=examine))
