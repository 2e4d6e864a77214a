"""Settings as flags with help and as YAML, all derived from ``Settings``; ``kvhearth config``."""

from __future__ import annotations

import functools
import inspect
import textwrap
import typing
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from pydantic.fields import FieldInfo
from rich.console import Console, Group
from rich.padding import Padding
from rich.panel import Panel
from rich.text import Text
from typer.core import TyperCommand, TyperOption

from kvhearth_server.cli.output import AsJson, Config, note, say, wrong
from kvhearth_server.config.load import Settings, flag_of, load_settings, unread_environment
from kvhearth_server.config.value_types import Shown

OWN_PANEL = "This command"
_STARTS = {
    "socket_dir": "Memory",
    "tenants": "Tenants",
    "shared_index": "Bounds",
    "attach_timeout_s": "Time and processors",
    "ssd_dirs": "SSD",
    "grpc": "Doors and other hosts",
    "log_level": "Log",
}
"""Panels by the setting that they begin with, in the order of the settings."""
_COLUMNS = 96
_HEAD = """\
Settings of the KVHearth daemon: each with its default; take away the # of those that you change.
Made by `kvhearth config sample`. A flag goes before the environment, that before this file:
slab_bytes here is KVHEARTH_SLAB_BYTES in the environment and --slab-bytes on the command line.
Sizes are written 65536, 512MiB or 64GiB; durations 0.5, 500ms, 30s or 24h.
"""


def metavar(field: FieldInfo) -> str:
    """Return the placeholder of a setting's value."""
    if (shown := _shown(field)) is not None:
        return shown.metavar
    if typing.get_origin(field.annotation) is typing.Literal:
        return "|".join(typing.get_args(field.annotation))
    if Path in (field.annotation, *typing.get_args(field.annotation)):
        return "DIR"
    if field.annotation is int:
        return "N"
    bounded = any(hasattr(item, "le") or hasattr(item, "lt") for item in field.metadata)
    return "FRACTION" if bounded else "NUMBER"


def _shown(field: FieldInfo) -> Shown | None:
    return next((item for item in field.metadata if isinstance(item, Shown)), None)


def _help(name: str, field: FieldInfo) -> str:
    """Return the description with the default as it would be written."""
    if field.default in (None, (), ""):
        return field.description or ""
    default = setting_line(name, field, field.default).partition(": ")[2].strip("'")
    return f"{field.description} (default {default})"


def _flag(name: str, field: FieldInfo, panel: str) -> inspect.Parameter:
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
        help=_help(name, field),
        metavar=None if field.annotation is bool else metavar(field),
        show_default=False,  # Settings has it; here every flag is unset until given
        rich_help_panel=panel,
    )
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, option]
    )


def with_flags(
    names: Collection[str] = tuple(Settings.model_fields),
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a function of ``**flags`` a flag for each setting of ``names``; it is called with those
    that were written on the command line.
    """
    panel, flags = OWN_PANEL, list[inspect.Parameter]()
    for name, field in Settings.model_fields.items():
        panel = _STARTS.get(name, panel)
        if name in names:
            flags.append(_flag(name, field, panel))

    def wrap(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def verb(**values: object) -> None:
            function(**{name: each for name, each in values.items() if each not in (None, [])})

        (*own, _) = inspect.signature(function, eval_str=True).parameters.values()
        parameters = [*(each.replace(kind=each.KEYWORD_ONLY) for each in own), *flags]
        verb.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        verb.__annotations__ = {each.name: each.annotation for each in parameters}
        return verb

    return wrap


class PanelCommand(TyperCommand):
    """Command whose options have a line of their own, with their description below it."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help on stdout, as wide as the terminal, at most 100 columns."""
        console = Console(highlight=False)
        width = min(console.width, 100)
        usage = f"Usage: {ctx.command_path} [OPTIONS]"
        console.print(Padding(Text(usage, style="bold"), (1, 1)), width=width)
        console.print(Padding(Text((self.help or "").strip()), (0, 1)), width=width)
        panels: dict[str, list[TyperOption]] = {}
        for each in self.get_params(ctx):
            if isinstance(each, TyperOption) and not each.hidden:
                panels.setdefault(each.rich_help_panel or OWN_PANEL, []).append(each)
        for title, options in panels.items():
            rows = Group(*(part for each in options for part in _rows(each)))
            console.print(Panel(rows, title=title, title_align="left"), width=width)
        console.print(Padding(Text(self.epilog or ""), (0, 1)), width=width)


def _rows(option: Any) -> tuple[Text, Padding]:
    names = " or ".join([*option.opts, *option.secondary_opts])
    value = "" if option.is_flag else f" {option.metavar or option.type.name.upper()}"
    return Text(names + value, style="bold"), Padding(Text(option.help or ""), (0, 0, 0, 4))


def sample_text() -> str:
    """Return a commented YAML file of all settings with their defaults."""
    return "\n".join(f"# {line}" for line in _HEAD.splitlines()) + "\n" + commented_settings()


def commented_settings(without: Collection[str] = ()) -> str:
    """Return a line for each setting with its default, in a comment, below its description."""
    lines = list[str]()
    for name, field in Settings.model_fields.items():
        if name in without:
            continue
        comments = textwrap.wrap(field.description or "", _COLUMNS)
        if field.annotation is not bool:
            comments.append(f"Form: {metavar(field)}")
        lines += ["", *(f"# {line}" for line in comments)]
        lines.append(f"#{setting_line(name, field, field.default)}")
    return "\n".join(lines) + "\n"


def settings_yaml(settings: Settings) -> str:
    """Return settings as a YAML file that yields them again."""
    fields = Settings.model_fields.items()
    lines = (setting_line(name, field, getattr(settings, name)) for name, field in fields)
    return "".join(f"{line}\n" for line in lines)


def setting_line(name: str, field: FieldInfo, value: object) -> str:
    """Return ``name: value`` as YAML in one line, the value as people write it."""
    value = _written(field, value)
    if value is None:  # left empty, which reads as nothing
        return f"{name}:"
    written = yaml.safe_dump(value, default_flow_style=True, width=1 << 20, allow_unicode=True)
    return f"{name}: {written.removesuffix('...' + chr(10)).strip()}"


def _written(field: FieldInfo, value: object) -> Any:
    if isinstance(value, tuple | list):
        return [part if isinstance(part, int) else str(part) for part in value]
    if (shown := _shown(field)) is not None and value is not None:
        text = shown.format(value)
        return int(text) if text.isdecimal() else text
    return value if value is None or isinstance(value, bool | int | float) else str(value)


def show(
    file: Annotated[
        Path | None,
        typer.Argument(help="YAML file of settings; same as --config.", metavar="[FILE]"),
    ] = None,
    config: Config = None,
    as_json: AsJson = False,
) -> None:
    """Check the settings from environment and file and print them as YAML; exit
    with 2 if they are invalid.
    """
    if file is not None and config is not None:
        raise wrong(f"{file} and --config {config}: name one file")
    for name in unread_environment():
        note(f"kvhearth: warning: no setting reads the environment variable {name}")
    settings = load_settings({}, file or config)
    say(settings.model_dump(mode="json"), settings_yaml(settings).rstrip(), as_json=as_json)


def sample(as_json: AsJson = False) -> None:
    """Print a commented YAML file of all settings with their defaults."""
    defaults = Settings.model_validate({}).model_dump(mode="json")
    fields = Settings.model_fields.items()
    found = {name: {"default": defaults[name], "help": each.description} for name, each in fields}
    say(found, sample_text().rstrip(), as_json=as_json)
