"""Writes what is generated from the code and checked in: ``make golden``."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from kvhearth_server.config import Settings
from kvhearth_server.observability.counters import Counters
from kvhearth_server.observability.exposition import metrics_page
from kvhearth_server.transport.web.app import describe, make_app

ROOT = Path(__file__).resolve().parents[2]
OPENAPI = ROOT / "tests" / "golden" / "openapi.json"
METRICS = ROOT / "docs" / "metrics.md"


def openapi() -> dict[str, Any]:
    """The description of the HTTP application, which needs no daemon for it."""
    engine = cast("Any", SimpleNamespace(boot_id="", counters=Counters()))
    return describe(make_app(engine, Settings(), ""))


def main() -> None:
    """Write all of them."""
    OPENAPI.write_text(json.dumps(openapi(), indent=2, sort_keys=True) + "\n")
    METRICS.write_text(metrics_page())


if __name__ == "__main__":
    main()
