"""Writes the checked-in files that are generated from the code: ``make golden``."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import typer.main
import yaml

from kvhearth.errors import STATUS
from kvhearth_server.cli.app import LAB_VERBS, build
from kvhearth_server.cli.config import metavar, setting_line
from kvhearth_server.config.load import Settings
from kvhearth_server.config.model import RELOADABLE
from kvhearth_server.observability.counters import Counters
from kvhearth_server.observability.metrics import COUNTERS, TABLE
from kvhearth_server.transport.operators import Operators
from kvhearth_server.transport.web.routes import describe, make_app

ROOT = Path(__file__).resolve().parents[2]
OPENAPI = ROOT / "tests" / "golden" / "openapi.json"
METRICS = ROOT / "docs" / "metrics.md"
MAP = ROOT / "ARCHITECTURE.md"
REFERENCE = ROOT / "docs" / "reference.md"
TROUBLE = ROOT / "docs" / "troubleshooting.md"
ALERTS = "\n## Alerts\n"
PACKAGES = ("client/kvhearth", "server/kvhearth_server", "lab/kvhearth_lab")
BEGIN = "<!-- Generated from the modules' docstrings by `make golden`. -->\n"
END = "<!-- End of the generated part. -->\n"
METRICS_HEAD = """# Metrics

The daemon serves these at `/metrics` of its HTTP address (`--http`, by default
`http://127.0.0.1:9460/metrics`), beside Prometheus' usual `process_*`. This page is written by
`make golden` from the table in `server/kvhearth_server/observability/metrics`; a test fails if they
differ.

Values are read when somebody scrapes, and a scrape costs the same whatever the cache holds. Every
label has few values. Counters start at zero with the daemon; those of clients travel with their
heartbeats.
"""


def openapi() -> dict[str, Any]:
    """Return the description of the HTTP application, which needs no daemon."""
    engine = cast("Any", SimpleNamespace(boot_id="", counters=Counters(COUNTERS)))
    return describe(make_app(engine, Settings(), Operators("")))


def modules_section() -> str:
    """Return a line for every package and module, from the first paragraph of its docstring."""
    return "\n".join(line for root in PACKAGES for line in _package(ROOT / root)) + "\n"


def architecture() -> str:
    """Return ARCHITECTURE.md with the list of modules regenerated."""
    before, _, rest = MAP.read_text(encoding="utf-8").partition(BEGIN)
    return before + BEGIN + "\n" + modules_section() + "\n" + END + rest.partition(END)[2]


def reference() -> str:
    """Return docs/reference.md: every command, setting and reason, from the code."""
    return "\n".join([*_commands(), *_settings(), *_reasons()]) + "\n"


def metrics_page() -> str:
    """Return the text of ``docs/metrics.md``."""
    lines = [
        METRICS_HEAD,
        "| metric | type | labels | what it is | what for |",
        "| --- | --- | --- | --- | --- |",
    ]
    for metric in TABLE:
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        cells = (f"`{metric.name}`", metric.kind, labels, metric.help, metric.use)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def troubleshooting() -> str:
    """Return docs/troubleshooting.md with its last table, the alerts' runbooks, regenerated."""
    groups = yaml.safe_load((ROOT / "deploy/prometheus/alerts.yml").read_text(encoding="utf-8"))[
        "groups"
    ]
    rules = [rule for group in groups for rule in group["rules"] if "alert" in rule]
    rows = [f"| {rule['alert']} | {rule['annotations']['runbook']} |" for rule in rules]
    before = TROUBLE.read_text(encoding="utf-8").partition(ALERTS)[0]
    return "\n".join([before + ALERTS, "| alert | what to do |", "| --- | --- |", *rows]) + "\n"


def _commands() -> Iterator[str]:
    yield "# Reference"
    yield ""
    yield "Generated from the code by `make golden`. [Metrics](metrics.md) have their own page."
    yield ""
    yield "## Commands"
    yield ""
    yield "`--json`, where it is, prints one JSON object on stdout. Exit status: 0 done; 1 refused,"
    yield "not reachable, or the checked condition does not hold; 2 wrong usage or setting; 3 no"
    yield "memory, huge pages, or usable arena or SSD directory."
    yield ""
    yield "| command | what it does | options |"
    yield "| --- | --- | --- |"
    for words, command in _verbs(typer.main.get_command(build())):
        if command.hidden:
            continue
        told = " ".join((command.help or "").partition("\n\n")[0].split())
        arguments = [each.metavar or "" for each in command.params if each.opts[0][0] != "-"]
        flags = [each.opts[0] for each in command.params if each.opts[0][0] == "-"]
        options = "the settings below" if len(flags) > 40 else ", ".join(f"`{f}`" for f in flags)
        name = " ".join(["kvhearth", *words, *filter(None, arguments)])
        yield f"| `{name}` | {told} | {options} |"
    yield ""


def _verbs(command: Any, *words: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    below = getattr(command, "commands", None)
    if below is None:
        yield words, command
    for name in below or ():
        if words or name not in LAB_VERBS:  # another distribution's, which says more itself
            yield from _verbs(below[name], *words, name)


def _settings() -> Iterator[str]:
    yield "## Settings"
    yield ""
    yield "Each is a flag of `kvhearth serve` (`--slab-bytes`), a variable (`KVHEARTH_SLAB_BYTES`)"
    yield "and a line of the YAML file (`slab_bytes:`), in this order of precedence. ↻ marks those"
    yield "that `kvhearth config reload` applies."
    yield ""
    yield "| setting | form | default | meaning |"
    yield "| --- | --- | --- | --- |"
    for name, field in Settings.model_fields.items():
        form = "true or false" if field.annotation is bool else metavar(field)
        shown = setting_line(name, field, field.default).partition(":")[2].strip() or "none"
        told = (field.description or "").replace("|", "\\|")
        mark = " ↻" if name in RELOADABLE else ""
        yield f"| `{name}`{mark} | {form.replace('|', ', ')} | {shown} | {told} |"
    yield ""


def _reasons() -> Iterator[str]:
    yield "## Reasons"
    yield ""
    yield "[troubleshooting.md](troubleshooting.md#reasons) says what to do. The status is gRPC's."
    yield ""
    yield "| reason | status | HTTP |"
    yield "| --- | --- | --- |"
    for reason, status in STATUS.items():
        yield f"| `{reason}` | {status.code.name} | {status.http} |"


def _package(folder: Path) -> Iterator[str]:
    if folder.name == "proto":
        return
    yield f"**`{folder.relative_to(ROOT)}/`** {_summary(folder / '__init__.py')}"
    yield ""
    modules = sorted(each for each in folder.glob("*.py") if not each.name.startswith("__"))
    yield from (f"- `{each.stem}`: {_summary(each)}" for each in modules)
    if modules:
        yield ""
    for each in sorted(folder.iterdir()):
        if (each / "__init__.py").exists():
            yield from _package(each)


def _summary(path: Path) -> str:
    reported = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return " ".join(reported.partition("\n\n")[0].split()).replace("``", "`")


def main() -> None:
    """Write all generated files."""
    OPENAPI.write_text(json.dumps(openapi(), indent=2, sort_keys=True) + "\n", encoding="utf-8")
    METRICS.write_text(metrics_page(), encoding="utf-8")
    MAP.write_text(architecture(), encoding="utf-8")
    REFERENCE.write_text(reference(), encoding="utf-8")
    TROUBLE.write_text(troubleshooting(), encoding="utf-8")


if __name__ == "__main__":
    main()
