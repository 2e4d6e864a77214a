"""Help of verbs with many options: a panel for each subject, readable at 80 columns."""

from __future__ import annotations

from typing import Any

from rich.console import Console, Group
from rich.padding import Padding
from rich.panel import Panel
from rich.text import Text
from typer.core import TyperCommand, TyperOption

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


def panel_of(name: str, names: list[str]) -> str:
    """Return the panel of a setting: of the last panel's start at or before it among ``names``."""
    found = OWN_PANEL
    for each in names:
        found = _STARTS.get(each, found)
        if each == name:
            break
    return found


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
