"""``kvhearth bench ttft``: time to the first token of real engines, with and without a cache."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from kvhearth.errors import KVHearthError, Reason
from kvhearth_server.cli.output import AsJson, console, draw_last, note, row, say_json, table
from kvhearth_server.cli.signals import cleaned_up

EPILOG = (
    "Example: kvhearth bench ttft --engine-python /opt/vllm/bin/python --models models --json | "
    "tail -n 1 | jq '{warm_ratio_4k, zero_hit_overhead, missed}'"
)
_WIDTH = 160


class Dtype(StrEnum):
    """Dtype of weights and KV."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


EnginePython = Annotated[
    Path,
    typer.Option(
        "--engine-python", help="Python of an environment with vLLM and kvhearth.", metavar="PYTHON"
    ),
]
Models = Annotated[
    Path,
    typer.Option(
        "--models",
        help="Folder of models; `mid` in it is used (tests/engines/models.py makes it).",
        metavar="DIR",
    ),
]
Lmcache = Annotated[
    Path | None,
    typer.Option(
        "--lmcache",
        help="Python of an environment with vLLM and lmcache.",
        metavar="PYTHON",
        show_default=False,
    ),
]
DtypeOption = Annotated[
    Dtype,
    typer.Option(
        "--dtype", help="Of weights and KV. In bfloat16 tokens differ where two are as likely."
    ),
]
Plot = Annotated[
    Path | None,
    typer.Option("--plot", help="Draw the figures, too.", metavar="FILE", show_default=False),
]
Threads = Annotated[
    int | None,
    typer.Option(
        "--threads",
        help="Threads that each engine computes with. By default one fewer than there are cores, "
        "as vLLM has it: its scheduler spins while they compute, and where it shares a core with "
        "one of them a step takes several times as long.",
        min=1,
        show_default=False,
    ),
]
Quick = Annotated[bool, typer.Option("--quick", help="One length, two rounds: a smoke test.")]


def ttft(
    *,
    engine_python: EnginePython,
    models: Models,
    lmcache: Lmcache = None,
    dtype: DtypeOption = Dtype.FLOAT32,
    as_json: AsJson = False,
    plot: Plot = None,
    threads: Threads = None,
    quick: Quick = False,
) -> None:
    """Measure the time to the first token: computed, from the engine's own memory, from KVHearth,
    and after a restart of the engine; and the connector's cost without a hit.

    After each restart every engine, with a connector or without, first answers two short prompts
    that no cache keeps, as for a readiness probe; `first_requests` gives their times. Figures after
    a restart have as many samples as those before it.

    Starts its own daemons and up to three engines at once, of some 2 GiB each. A peer that cannot
    be measured is not an error: `skipped` gives the reason.
    """
    from kvhearth_lab.bench.local.plot import require_plotter
    from kvhearth_lab.bench.ttft.plot import draw
    from kvhearth_lab.bench.ttft.run import Given, run
    from kvhearth_lab.bench.ttft.sizes import MODEL, sizes_of

    if plot is not None:
        require_plotter()
    if not os.access(engine_python, os.X_OK):
        raise _bad(f"--engine-python: no interpreter at {engine_python}")
    if not (models / MODEL / "config.json").is_file():
        raise _bad(f"--models: no model at {models / MODEL}")
    with cleaned_up():  # includes the engines
        threads = threads or max(len(os.sched_getaffinity(0)) - 1, 1)
        given = Given(engine_python, models.resolve(), lmcache, threads)
        found = {**run(sizes_of(quick=quick, dtype=dtype.value), given, note), "quick": quick}
    # With --json, stdout holds only the object; the table goes to stderr for a person.
    to = Console(stderr=True, width=_WIDTH, highlight=False) if as_json else console()
    for each in shown(found):
        to.print(each)
    if as_json:
        say_json(found)
    draw_last(draw, found, plot)


def shown(found: Mapping[str, Any]) -> Iterator[Table]:
    """Yield a table with one row a figure, and a table of further notes."""
    from kvhearth_lab.bench.ttft.figures import figure_list

    made = table("figure", "value", "spread", "target", "ok", "what", right=("value", "target"))
    for each in figure_list(found["sizes"]["prompt_tokens"]):
        value, spread = found.get(each.name), found["spread"].get(each.name)
        good = each.good(value)
        ok = "" if good is None else "yes" if good else "NO"
        around = "" if spread is None else f"{spread[0]:g} .. {spread[1]:g}"
        row(made, each.name, _text(value), around, each.target, ok, each.what)
    same = found["identical_tokens"]
    row(made, "identical_tokens", _text(same), "", "yes", "yes" if same else "NO", "of all answers")
    yield made
    rest = table("besides", "what")
    for name in ("differing", "not_served"):
        for text in found[name]:
            row(rest, name.replace("_", " "), text)
    for name, reason in found["skipped"].items():
        row(rest, "skipped", f"{name}: {reason}")
    if rest.row_count:
        yield rest


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,.4g}" if isinstance(value, int | float) else "-"


def _bad(problem: str) -> KVHearthError:
    return KVHearthError(Reason.CONFIG_INVALID, problem)
