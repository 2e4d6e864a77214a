"""Fail-open boundary of a connector: none of its exceptions reaches the engine's loop."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

from kvhearth.counters import LOGGER, Warnings

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
                _warnings.warn(name, "%s goes without the cache: %r", name, error)
                LOGGER.debug("%s failed", name, exc_info=True)
                self.record_failure(name)
                return otherwise()

        return cast(MethodT, call)

    return wrap


def nothing() -> None:
    """Fallback of methods that return nothing."""
