"""Fail-open boundary of a connector: none of its exceptions reaches the engine's loop."""

from __future__ import annotations

import functools
from collections.abc import Callable
from logging import DEBUG
from typing import Any, TypeVar, cast

from kvhearth.counters import Warnings, log_event

MethodT = TypeVar("MethodT", bound=Callable[..., Any])

_warnings = Warnings()


def guarded(otherwise: Callable[[], Any]) -> Callable[[MethodT], MethodT]:
    """Make a method return ``otherwise()`` where it would raise.

    The method's object must have a method ``record_failure(name)``, which counts it and raises
    nothing.
    """

    def wrap(method: MethodT) -> MethodT:
        name = method.__name__

        @functools.wraps(method)
        def call(self: Any, /, *args: Any, **kwargs: Any) -> Any:
            try:
                return method(self, *args, **kwargs)
            except Exception as error:  # noqa: BLE001 - fail-open boundary: the engine's own loop
                _warnings.warn(
                    "connector.call_failed",
                    "the engine goes on without the cache",
                    kind=name,
                    call=name,
                    error=repr(error),
                )
                log_event(DEBUG, "connector.call_failed", "in full", trace=True, call=name)
                self.record_failure(name)
                return otherwise()

        return cast(MethodT, call)

    return wrap


def nothing() -> None:
    """Fallback of methods that return nothing."""
