"""Writes the checked-in files that are generated from the code: ``make golden``."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from kvhearth_server.config.load import Settings
from kvhearth_server.observability.counters import Counters
from kvhearth_server.observability.exposition import metrics_page
from kvhearth_server.observability.metrics import COUNTERS
from kvhearth_server.transport.operators import Operators
from kvhearth_server.transport.web.routes import describe, make_app

ROOT = Path(__file__).resolve().parents[2]
OPENAPI = ROOT / "tests" / "golden" / "openapi.json"
METRICS = ROOT / "docs" / "metrics.md"
MAP = ROOT / "ARCHITECTURE.md"
PACKAGES = ("client/kvhearth", "server/kvhearth_server", "lab/kvhearth_lab")
BEGIN = "<!-- Generated from the modules' docstrings by `make golden`. -->\n"
END = "<!-- End of the generated part. -->\n"


def openapi() -> dict[str, Any]:
    """Return the description of the HTTP application, which needs no daemon."""
    engine = cast("Any", SimpleNamespace(boot_id="", counters=Counters(COUNTERS)))
    return describe(make_app(engine, Settings(), Operators("")))


def modules_section() -> str:
    """Return a line for every package and module, from the first paragraph of its docstring."""
    return "\n".join(line for root in PACKAGES for line in _package(ROOT / root)) + "\n"


def architecture() -> str:
    """Return ARCHITECTURE.md with the list of modules regenerated."""
    before, _, rest = MAP.read_text().partition(BEGIN)
    return before + BEGIN + "\n" + modules_section() + "\n" + END + rest.partition(END)[2]


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
    OPENAPI.write_text(json.dumps(openapi(), indent=2, sort_keys=True) + "\n")
    METRICS.write_text(metrics_page())
    MAP.write_text(architecture())


if __name__ == "__main__":
    main()
