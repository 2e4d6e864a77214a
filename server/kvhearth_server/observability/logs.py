"""Structured logging, throttled so that a flood of bad input cannot flood the log."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, MutableMapping
from typing import Any, Literal, TextIO

import structlog
from rich.console import Console
from rich.progress import Progress, TaskID
from structlog.typing import Processor

KINDS_MAX = 64
OWN = "kvhearth"
FOREIGN_CHARS_MAX = 4096
"""Longest text of another package's record."""
_FOREIGN_BURST = 5


class Throttle:
    """Admits some events of each kind per interval, and counts those that it holds back.

    Not thread-safe. Beyond ``KINDS_MAX`` kinds all further ones are one.

    Args:
        interval_s: length of an interval, from its first event, in seconds.
        clock: monotonic seconds.
        burst: events of a kind that are admitted in an interval.
    """

    def __init__(
        self,
        interval_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
        burst: int = 1,
    ) -> None:
        self._interval_s = interval_s
        self._clock = clock
        self._burst = burst
        self._next: dict[str, float] = {}
        self._passed: dict[str, int] = {}
        self._held_back: dict[str, int] = {}

    def admit(self, kind: str) -> int | None:
        """Return how many of this kind were held back before; None if this one is held back too."""
        if kind not in self._next and len(self._next) >= KINDS_MAX:
            kind = ""
        now = self._clock()
        if now >= self._next.get(kind, now):
            self._next[kind], self._passed[kind] = now + self._interval_s, 0
        elif self._passed[kind] >= self._burst:
            self._held_back[kind] = self._held_back.get(kind, 0) + 1
            return None
        self._passed[kind] += 1
        return self._held_back.pop(kind, 0)


class LimitedLog:
    """A logger for events that peers can cause: a limited number of lines of each kind per
    interval. Any thread may log.

    Args:
        log: a logger from ``get_logger``.
        throttle: decides; by default one line a second.
    """

    def __init__(self, log: Any, throttle: Throttle | None = None) -> None:
        self._log = log
        self._throttle = Throttle() if throttle is None else throttle
        self._lock = threading.Lock()

    def warning(self, event: str, *, kind: str, **fields: object) -> None:
        """Log ``event`` unless it is held back; ``suppressed`` tells how many before it were.

        Args:
            kind: events counted together: an event and a reason.
        """
        if (admitted := self._admitted(kind, fields)) is not None:
            self._log.warning(event, **admitted)

    def info(self, event: str, *, kind: str, **fields: object) -> None:
        """Log a normal event at level info, under the same limits as ``warning``."""
        if (admitted := self._admitted(kind, fields)) is not None:
            self._log.info(event, **admitted)

    def _admitted(self, kind: str, fields: dict[str, object]) -> dict[str, object] | None:
        with self._lock:
            suppressed = self._throttle.admit(kind)
        if suppressed is None:
            return None
        return {**fields, "suppressed": suppressed} if suppressed else fields


class LimitedRecords(logging.Filter):
    """Limits records of other packages' loggers, which peers can cause too: of each place in their
    code some lines per interval. Any thread may log.
    """

    def __init__(self, throttle: Throttle | None = None) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._throttle = Throttle(burst=_FOREIGN_BURST) if throttle is None else throttle

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether ``record`` is logged."""
        if record.name == OWN or record.name.startswith(f"{OWN}."):
            return True
        with self._lock:
            # Not by its text, which may be the peer's.
            suppressed = self._throttle.admit(f"{record.pathname}:{record.lineno}")
        if suppressed:
            record.suppressed = suppressed
        return suppressed is not None


def _cut_foreign(_: Any, __: str, fields: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Bound the text of another package's record, and its exception's."""
    for name, value in fields.items():
        if isinstance(value, str) and len(value) > FOREIGN_CHARS_MAX:
            fields[name] = f"{value[:FOREIGN_CHARS_MAX]}... ({len(value)} characters)"
    return fields


def _printable(_: Any, __: str, fields: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Escape what a terminal would obey or take for a line of its own; of a traceback, the lines
    stay.
    """
    for name, value in fields.items():
        if name in ("exception", "stack") and isinstance(value, str):
            fields[name] = "\n".join(f"  {one_line(line)}" for line in value.split("\n"))
        elif isinstance(value, str):
            fields[name] = one_line(value)
    return fields


def one_line(text: str) -> str:
    """Return ``text`` with unprintable characters as escapes: it may come from a file or a peer."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


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
            foreign_pre_chain=[
                *shared,
                structlog.stdlib.ExtraAdder(),
                structlog.processors.format_exc_info,
                _cut_foreign,
            ],
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                *_renderers(json_lines, colors=out.isatty()),
            ],
        )
    )
    handler.addFilter(LimitedRecords())
    root = logging.getLogger()
    for old in [each for each in root.handlers if each.get_name() == _HANDLER_NAME]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(number)


def capture() -> None:
    """Log what Python itself would print: warnings, and exceptions that nobody can catch."""
    logging.captureWarnings(True)
    sys.unraisablehook = _unraisable


def _unraisable(about: sys.UnraisableHookArgs) -> None:
    error = about.exc_value
    trace = None if error is None else (type(error), error, about.exc_traceback)
    logging.getLogger("python").error(about.err_msg or "exception ignored", exc_info=trace)


def redirect(stream: TextIO) -> TextIO | None:
    """Write to ``stream`` from now on; return the previous stream, None before ``configure``."""
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
    return [
        structlog.processors.format_exc_info,
        _printable,
        structlog.dev.ConsoleRenderer(
            colors=colors, exception_formatter=structlog.dev.plain_traceback
        ),
    ]


def get_logger(name: str) -> Any:
    """Return a logger with ``debug/info/warning/error/exception(event, **fields)`` and
    ``bind(**fields)``.

    Args:
        name: dotted, starting with ``kvhearth.``; may be called before ``configure``.
    """
    return structlog.stdlib.get_logger(name)


class StartBar:
    """A context in which ``note`` draws; silent when stderr is no terminal.

    While a bar is drawn the log is written through it, so that no log line ends up inside the bar.

    Args:
        doing: the verb before the counted things, such as ``populating``.
    """

    def __init__(self, doing: str) -> None:
        self._doing = doing
        self._bar = Progress(
            console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()
        )
        self._tasks: dict[str, TaskID] = {}
        self._log_stream: TextIO | None = None

    def __enter__(self) -> StartBar:
        self._bar.start()
        if not self._bar.disable:
            self._log_stream = redirect(sys.stderr)
        return self

    def note(self, what: str, done: int, total: int) -> None:
        """Show that ``done`` of ``total`` of ``what`` are there."""
        if what not in self._tasks:
            self._tasks[what] = self._bar.add_task(f"{self._doing} {what}", total=total)
        self._bar.update(self._tasks[what], completed=done)

    def __exit__(self, *_: object) -> None:
        if not self._bar.disable:  # rich 13.8 ends a line that it did not begin
            self._bar.stop()
        if self._log_stream is not None:
            redirect(self._log_stream)
