"""A table of cases in one test, which runs them all and tells each that failed."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import pytest


def cases(names: str | tuple[str, ...], rows: Iterable[Any]) -> Callable[[Any], Any]:
    """Run a test with each row, as ``pytest.mark.parametrize`` does, but as one test.

    The rows share the test's fixtures. Several tables of one test are multiplied. A row that skips
    skips the whole test.
    """
    named = tuple(names.split(", ")) if isinstance(names, str) else names
    table = list(rows)

    def decorate(test: Any) -> Any:
        @functools.wraps(test)
        def run_all(*args: Any, **fixtures: Any) -> None:
            failed: list[BaseException] = []
            for row in table:
                case = dict(zip(named, (row,) if len(named) == 1 else row, strict=True))
                try:
                    test(*args, **fixtures, **case)
                except (Exception, pytest.fail.Exception) as error:  # noqa: BLE001 - told below
                    error.add_note(f"case: {case}")
                    failed.append(error)
            if failed:
                raise BaseExceptionGroup(f"{len(failed)} of {len(table)} cases failed", failed)

        signature = inspect.signature(test)
        kept = [each for name, each in signature.parameters.items() if name not in named]
        run_all.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
        return run_all

    return decorate
