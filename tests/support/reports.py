"""Reports of a daemon as tests make them up: whatever is not given is empty."""

from __future__ import annotations

import dataclasses
import typing
from typing import Any, TypeVar

from kvhearth_server.engine.snapshot import Stats
from kvhearth_server.tiers.figures import TierFigures

Report = TypeVar("Report")


def report(kind: type[Report], **values: Any) -> Report:
    """Return a report with these values."""
    hints = typing.get_type_hints(kind)
    empty = {
        each.name: None if type(None) in typing.get_args(hints[each.name]) else _empty(hints, each)
        for each in dataclasses.fields(kind)  # type: ignore[arg-type]
        if each.name not in values
    }
    return kind(**(empty | values))


def _empty(hints: dict[str, Any], field: dataclasses.Field[Any]) -> Any:
    kind = hints[field.name]
    return (typing.get_origin(kind) or kind)()


def stats(**values: Any) -> Stats:
    """Return statistics with these values."""
    return report(Stats, **values)


def ssd(**values: Any) -> TierFigures:
    """Return an SSD tier with these values."""
    return report(TierFigures, **values)
