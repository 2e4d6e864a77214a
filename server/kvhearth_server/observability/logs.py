"""Structured logs on stderr: JSON for machines, coloured lines on a terminal.

``get_logger(name).info("slab given", slot_bytes=65536)``: the event is a constant text, what varies
is a field. Records of the standard library's logging (gRPC, asyncio) come out in the same form.
"""

from __future__ import annotations

import logging
import sys
from typing import Any, Literal, TextIO

import structlog
from structlog.typing import Processor

Level = Literal["debug", "info", "warning", "error"]
Form = Literal["auto", "json", "console"]

_HANDLER_NAME = "kvhearth"


def configure(level: Level = "info", form: Form = "auto", stream: TextIO | None = None) -> None:
    """Set up logging of the whole process; a second call replaces the first.

    Args:
        level: the least level that is written.
        form: ``auto`` is ``console`` if ``stream`` is a terminal, else ``json``.
        stream: where to write; by default stderr.
    """
    out = sys.stderr if stream is None else stream
    json_lines = form == "json" or (form == "auto" and not out.isatty())
    number = getattr(logging, level.upper())
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        # Levels below are dropped by a method that does nothing, before any field is looked at.
        wrapper_class=structlog.make_filtering_bound_logger(number),
        cache_logger_on_first_use=False,  # module-level loggers exist before this call
    )
    handler = logging.StreamHandler(out)
    handler.set_name(_HANDLER_NAME)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, structlog.stdlib.ExtraAdder()],
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                *_renderers(json_lines, colors=out.isatty()),
            ],
        )
    )
    root = logging.getLogger()
    for old in [each for each in root.handlers if each.get_name() == _HANDLER_NAME]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(number)


def redirect(stream: TextIO) -> TextIO | None:
    """Write to ``stream`` from now on; where it was written before, None before ``configure``."""
    for handler in logging.getLogger().handlers:
        if handler.get_name() == _HANDLER_NAME and isinstance(handler, logging.StreamHandler):
            before: TextIO | None = handler.setStream(stream)
            return before
    return None


def _renderers(json_lines: bool, *, colors: bool) -> list[Processor]:
    if json_lines:
        return [
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(sort_keys=True),
        ]
    return [structlog.dev.ConsoleRenderer(colors=colors)]


def get_logger(name: str) -> Any:
    """A logger with ``debug/info/warning/error/exception(event, **fields)`` and ``bind(**fields)``.

    Args:
        name: dotted, starting with ``kvhearth.``; may be called before ``configure``.
    """
    return structlog.stdlib.get_logger(name)
