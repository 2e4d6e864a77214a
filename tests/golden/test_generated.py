"""Checked-in generated files match the code; ``make golden`` rewrites them."""

from __future__ import annotations

import json
import re
from typing import Any

from golden.generated import (
    MAP,
    METRICS,
    OPENAPI,
    REFERENCE,
    ROOT,
    TROUBLE,
    architecture,
    metrics_page,
    openapi,
    reference,
    troubleshooting,
)

STALE = "run: make golden"
GUARDED = (
    "/v1/config",
    "/v1/sessions",
    "/v1/namespaces",
    "/v1/leases",
    "/v1/pins",
    "/v1/keys/{key}",
)


def promise(schema: Any) -> Any:
    """Reduce a schema to the parts that clients rely on; texts and FastAPI's own habits are left
    out.
    """
    if isinstance(schema, list):
        return [promise(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    passed_over = {"title", "description", "summary", "default"}
    named = {name: promise(value) for name, value in schema.items() if name not in passed_over}
    if "properties" in schema:  # in "properties" a field may be called title
        named["properties"] = {name: promise(one) for name, one in schema["properties"].items()}
    return named


def test_openapi() -> None:
    stored = json.loads(OPENAPI.read_text(encoding="utf-8"))
    now = openapi()
    assert promise(now["paths"]) == promise(stored["paths"]), STALE
    assert promise(now["components"]["schemas"]) == promise(stored["components"]["schemas"]), STALE


def test_every_operation_says_its_problems() -> None:
    for path, operations in openapi()["paths"].items():
        for method, operation in operations.items():
            assert "422" not in operation["responses"], path
            assert operation["responses"]["400"]["content"].keys() == {"application/problem+json"}
            guarded = method == "post" or path.startswith("/debug") or path in GUARDED
            assert ("security" in operation) == guarded, path
            assert ("403" in operation["responses"]) == guarded, path


def test_every_reference_is_there() -> None:
    found = openapi()
    text = json.dumps(found)
    for name in text.split('"#/components/schemas/')[1:]:
        assert name.partition('"')[0] in found["components"]["schemas"]


def test_metrics_page() -> None:
    assert METRICS.read_text(encoding="utf-8") == metrics_page(), STALE


def test_troubleshooting_has_every_alerts_runbook() -> None:
    assert TROUBLE.read_text(encoding="utf-8") == troubleshooting(), STALE


def test_reference() -> None:
    assert REFERENCE.read_text(encoding="utf-8") == reference(), STALE


def test_architecture_lists_every_module() -> None:
    assert MAP.read_text(encoding="utf-8") == architecture(), STALE


def test_each_row_of_the_map_names_at_most_five_files_that_exist() -> None:
    section = (
        MAP.read_text(encoding="utf-8")
        .partition("## I want to add ...")[2]
        .partition("## Modules")[0]
    )
    rows = [line for line in section.splitlines() if line.startswith(("| a ", "| an "))]
    assert len(rows) > 5
    for row in rows:
        named = re.findall(r"`((?:client|server|lab|proto|tests|deploy|docs)/[\w./]*)`", row)
        assert 1 <= len(named) <= 5, row
        assert [name for name in named if not (ROOT / name).exists()] == []


def test_the_ways_of_a_store_and_a_lookup_name_modules_that_exist() -> None:
    ways = (
        MAP.read_text(encoding="utf-8")
        .partition("\n## One store\n")[2]
        .partition("## I want to add ...")[0]
    )
    heads = re.findall(r"^\d+\. ([^:]*): ", ways, re.MULTILINE)
    named = [name for head in heads for name in re.findall(r"`([^`]+)`", head)]
    assert len(named) > 50
    roots = (ROOT / "client/kvhearth", ROOT / "server/kvhearth_server")
    absent = [
        n for n in named if not any((r / f"{n}.py").exists() or (r / n).is_dir() for r in roots)
    ]
    assert absent == []
