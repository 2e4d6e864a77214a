"""``kvhearth bench``: benchmarks that start their own daemons."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from kvhearth.errors import KVHearthError, Reason
from kvhearth_lab.cli import cleaned_up
from kvhearth_server.cli.output import AsJson, console, note, row, say_json, table
from kvhearth_server.config.value_types import parse_size

if TYPE_CHECKING:
    from kvhearth_lab.bench.report import Figure

LOCAL_EPILOG = "Example: kvhearth bench local --json | jq '{store_ratio, load_ratio, missed}'"
PEERS_EPILOG = (
    "Example: kvhearth bench peers --lmcache /opt/lmcache/bin/python --json | tail -n 1 | jq .peers"
)
SSD_EPILOG = (
    "Example: kvhearth bench ssd --dir /mnt/nvme --json | tail -n 1 | "
    "jq '{write_of_best, read_of_best, missed}'"
)
FRONTS_EPILOG = (
    "Example: kvhearth bench fronts --vllm /opt/vllm/bin/python --json | tail -n 1 | "
    "jq '{vllm_tier_load_vs_fs, vllm_tier_load_vs_copy, missed}'"
)
GPU_EPILOG = (
    "Example: kvhearth bench gpu --json | tail -n 1 | "
    "jq '{load_block_2mib_ratio, ttft_16k_ratio, missed}'"
)
REMOTE_EPILOG = (
    "Example: kvhearth bench remote --json | tail -n 1 | jq '{put_ratio, get_ratio, missed}'"
)
SCHEDULER_EPILOG = (
    "Example: kvhearth bench scheduler --engine-python /opt/vllm/bin/python --json | "
    "tail -n 1 | jq '{decode_step_share, full_hit_admission_us, missed}'"
)
STALLS_EPILOG = (
    "Example: kvhearth bench stalls --json | tail -n 1 | jq '{longest_call_cpu_ms, missed}'"
)
TTFT_EPILOG = (
    "Example: kvhearth bench ttft --engine-python /opt/vllm/bin/python --models models --json | "
    "tail -n 1 | jq '{warm_ratio_4k, zero_hit_overhead, missed}'"
)
_WIDTH = 160

Found = Mapping[str, Any]
Plot = Annotated[
    Path | None,
    typer.Option("--plot", help="Write a plot of the figures.", metavar="FILE", show_default=False),
]


class Dtype(StrEnum):
    """Dtype of weights and KV."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


def _python(flag: str, help_: str) -> Any:
    return typer.Option(flag, help=help_, metavar="PYTHON", show_default=False)


def _memory(help_: str) -> Any:
    return typer.Option("--memory", help=help_, metavar="SIZE", show_default=False)


def _quick(help_: str) -> Any:
    return typer.Option("--quick", help=help_)


def local(
    as_json: AsJson = False,
    plot: Plot = None,
    quick: Annotated[bool, _quick("Run half a minute instead of minutes; more noise.")] = False,
    memory: Annotated[
        str | None,
        _memory("Memory of one daemon (default: enough for a million blocks, 4.1GiB)."),
    ] = None,
) -> None:
    """Measure this machine's daemon and client against memcpy and an empty
    call, in one run.

    Starts its own daemons. Missing a target is not an error: `missed` names
    those figures.
    """
    from kvhearth_lab.bench.local import run as bench
    from kvhearth_lab.bench.local.figures import draw, sizes_of

    _check(plot)
    sizes = sizes_of(quick=quick, memory_bytes=_bytes(memory))
    found = {**bench.run(sizes), "quick": quick}
    _report(found, local_tables(found), draw, plot, as_json=as_json, beside=False)


def local_tables(found: Found) -> Iterator[Table]:
    """Yield a table with one row a figure."""
    from kvhearth_lab.bench.local.figures import FIGURES

    made = _figure_table(found, FIGURES)
    balanced = found["books"]["balanced"]
    row(made, "books", "", "", "balanced", "yes" if balanced else "NO", "recounted at the end")
    yield made


def peers(
    *,
    lmcache: Annotated[
        Path | None, _python("--lmcache", "Python interpreter with lmcache.")
    ] = None,
    mooncake: Annotated[
        Path | None,
        _python("--mooncake", "Python interpreter with mooncake-transfer-engine-non-cuda."),
    ] = None,
    as_json: AsJson = False,
    plot: Plot = None,
    quick: Annotated[bool, _quick("Run fewer rounds; more noise.")] = False,
    no_hugepages: Annotated[
        bool, typer.Option("--no-hugepages", help="Disable 2 MiB pages for all contenders.")
    ] = False,
    memory: Annotated[
        str | None, _memory("Memory of one daemon, ours or a peer's (default: 1GiB).")
    ] = None,
) -> None:
    """Measure other caches and KVHearth in turns, in the sizes of `kvhearth
    bench local`.

    Starts its own daemons. A peer that cannot be measured is not an error:
    `skipped` gives the reason.
    """
    from kvhearth_lab.bench.local.figures import sizes_of
    from kvhearth_lab.bench.peers import run as pairs
    from kvhearth_lab.bench.peers.run import draw

    _check(plot)
    sizes = sizes_of(quick=quick, memory_bytes=_bytes(memory))
    given = dict(zip(pairs.PEERS, (lmcache, mooncake), strict=True))
    found = {**pairs.run(sizes, given, note, hugepages=not no_hugepages), "quick": quick}
    _report(found, peers_tables(found), draw, plot, as_json=as_json, beside=True)


def peers_tables(found: Found) -> Iterator[Table]:
    """Yield one table a peer, and one of the skipped peers and parts."""
    from kvhearth_lab.bench.peers.run import figure_names

    for name, pair in found["peers"].items():
        if not figure_names(pair):
            continue
        made = table(
            "figure", "ours", "spread", name, "spread", "theirs / ours", right=("ours", name)
        )
        made.title = f"{name} {pair.get('versions', {}).get(name, '')}"
        made.title_justify = "left"
        for figure in figure_names(pair):
            cells = []
            for side in ("ours", "peer"):
                cells += [_text(pair[side].get(figure)), _around(pair[side], figure)]
            row(made, figure, *cells, _times(pair, figure))
        yield made
    yield from _skipped(found)


def _times(pair: Mapping[str, Any], figure: str) -> str:
    """Return the peer's time over ours as text; empty in ratio rows of single blocks."""
    measure = figure.removesuffix("_p50_us").removesuffix("_ratio")
    if "_one" in measure and figure.endswith("_ratio"):
        return ""  # shown in the row of the time
    value = pair["against"].get(measure)
    return "" if value is None else f"{value:g}"


def remote(
    *,
    redis: Annotated[
        Path | None,
        _python("--redis", "Python interpreter with redis and hiredis, beside redis-server."),
    ] = None,
    mooncake: Annotated[
        Path | None,
        _python("--mooncake", "Python interpreter with mooncake-transfer-engine-non-cuda."),
    ] = None,
    lm: Annotated[
        Path | None, _python("--lmcache", "Python interpreter with lmcache, for lm://.")
    ] = None,
    as_json: AsJson = False,
    plot: Plot = None,
    quick: Annotated[bool, _quick("Run fewer rounds; more noise.")] = False,
) -> None:
    """Measure puts and gets through a gateway over loopback against bare
    sockets, and against other caches over TCP, in turns.

    Starts its own daemons, of 1 GiB each. Missing a target is not an error:
    `missed` names those figures. Nor is a peer that cannot be measured.
    """
    from kvhearth_lab.bench.remote.figures import FULL, PEERS, QUICK, draw
    from kvhearth_lab.bench.remote.run import run

    _check(plot)
    given = dict(zip(PEERS, (redis, mooncake, lm), strict=True))
    with cleaned_up():
        found = {**run(QUICK if quick else FULL, given, note), "quick": quick}
    _report(found, remote_tables(found), draw, plot, as_json=as_json, beside=True)


def remote_tables(found: Found) -> Iterator[Table]:
    """Yield the figures, then GB/s of all sides, then the skipped peers."""
    from kvhearth_lab.bench.peers.adapters.harness import CONNECTIONS
    from kvhearth_lab.bench.remote.figures import FIGURES

    yield _figure_table(found, FIGURES)
    heads = [f"{operation} {count}" for operation in ("put", "get") for count in CONNECTIONS]
    made = table("GB/s, connections", *heads, right=tuple(heads))
    for side, own in found["gbs"].items():
        values = [own[word].get(count) for word, count in map(str.split, heads)]
        row(made, side, *map(_text, values))
    yield made
    yield from _skipped(found)


def ssd(
    *,
    folder: Annotated[
        Path,
        typer.Option("--dir", help="Empty directory on the drive to measure; left empty."),
    ] = Path(),
    as_json: AsJson = False,
    plot: Plot = None,
    quick: Annotated[bool, _quick("Run half a minute instead of minutes; more noise.")] = False,
    interface: Annotated[
        str,
        typer.Option("--interface", help="Kernel interface: auto, libaio or threads."),
    ] = "auto",
    depth: Annotated[
        int, typer.Option("--depth", help="Maximum number of requests in flight.", min=1, max=4096)
    ] = 32,
    lmcache: Annotated[
        Path | None,
        _python("--lmcache", "Python interpreter with lmcache: also measure its fs_native."),
    ] = None,
    vllm: Annotated[
        Path | None,
        _python("--vllm", "Python interpreter with vllm: also measure its filesystem tier."),
    ] = None,
) -> None:
    """Measure the SSD tier against its own drive, through the same kernel
    interface, in one run.

    Uses no running daemon and up to 5 GiB of the drive. Missing a target is not
    an error: `missed` names those figures. Nor is a peer that cannot be
    measured.
    """
    from kvhearth_lab.bench.ssd.figures import FULL, QUICK, draw
    from kvhearth_lab.bench.ssd.peers import LMCACHE, VLLM
    from kvhearth_lab.bench.ssd.run import run

    _check(plot)
    peers = {LMCACHE: lmcache, VLLM: vllm}
    sizes = replace(QUICK if quick else FULL, depth=depth)
    with cleaned_up():
        found = {**run(folder, sizes, interface, peers), "depth": depth, "quick": quick}
    _report(found, ssd_tables(found), draw, plot, as_json=as_json, beside=True)


def ssd_tables(found: Found) -> Iterator[Table]:
    """Yield the figures, then the peers, then the skipped parts."""
    from kvhearth_lab.bench.ssd.figures import FIGURES

    made = _figure_table(found, FIGURES)
    made.title = f"{found['interface']}, slots in pages of {found['pages']}"
    made.title_justify = "left"
    yield made
    if found["peers"]:
        yield _beside(found["peers"])
    yield from _skipped(found)


def _beside(peers: Mapping[str, Any]) -> Table:
    names = list(next(iter(peers.values()))["spread"])
    heads = [head for name in peers for head in (name, "spread")]
    made = table("figure", *heads, right=tuple(peers))
    for name in names:
        cells = [c for peer in peers.values() for c in (_text(peer.get(name)), _around(peer, name))]
        row(made, name, *cells)
    return made


def fronts(
    *,
    vllm: Annotated[Path | None, _python("--vllm", "Python interpreter with vllm.")] = None,
    sglang: Annotated[Path | None, _python("--sglang", "Python interpreter with sglang.")] = None,
    lmcache: Annotated[
        Path | None, _python("--lmcache", "Python interpreter with lmcache.")
    ] = None,
    folder: Annotated[
        Path,
        typer.Option("--dir", help="Directory on the drive to measure; left as it was."),
    ] = Path(),
    as_json: AsJson = False,
    quick: Annotated[bool, _quick("Run few rounds of small jobs; more noise.")] = False,
) -> None:
    """Measure vLLM's tiers, SGLang's HiCache and LMCache's L2 over KVHearth
    and over their own files, in turns, through the engines' own classes.

    Runs from a checkout. Starts its own daemons, of 1 GiB each, and uses up to
    5 GiB of the drive. Missing a target is not an error: `missed` names those
    figures. Nor is an engine that is not there; one whose program fails is.
    """
    from kvhearth_lab.bench.fronts.figures import FULL, QUICK
    from kvhearth_lab.bench.fronts.run import run

    given = {"vllm": vllm, "sglang": sglang, "lmcache": lmcache}
    with cleaned_up():
        found = {**run(folder, QUICK if quick else FULL, given, note), "quick": quick}
    _report(found, fronts_tables(found), as_json=as_json, beside=True)
    if found["skipped"].keys() - given:
        raise typer.Exit(1)


def fronts_tables(found: Found) -> Iterator[Table]:
    """Yield the figures, then GB/s of both sides and of plain copies, then the skipped parts."""
    from kvhearth_lab.bench.fronts.figures import FIGURES

    yield _figure_table(found, [each for each in FIGURES if each.name in found])
    sides = ("ours", "theirs", "copy")
    heads = [f"{job} {side}" for job in ("store", "load") for side in sides]
    made = table("engine", "pages", *heads, right=heads)
    made.title, made.title_justify = "GB/s", "left"
    for engine, parts in found["engines"].items():
        for pages, each in parts["runs"].items():
            values = (each["gbs"][job][side] for job, side in map(str.split, heads))
            row(made, engine, pages, *map(_text, values))
    yield made
    yield from _skipped(found)


def stalls(
    as_json: AsJson = False,
    plot: Plot = None,
    quick: Annotated[
        bool, _quick("Run half a minute instead of minutes, with few blocks.")
    ] = False,
) -> None:
    """Measure the longest call of a daemon's loop in processor time while real
    clients use it.

    Starts its own daemons, with blocks of 64 bytes, and takes up to 4 GiB of
    memory. Missing a target is not an error: `missed` names those figures.
    """
    from kvhearth_lab.bench.stalls.figures import FULL, QUICK, draw
    from kvhearth_lab.bench.stalls.run import run

    _check(plot)
    found = {**run(QUICK if quick else FULL), "quick": quick}
    _report(found, stalls_tables(found), draw, plot, as_json=as_json, beside=False)


def stalls_tables(found: Found) -> Iterator[Table]:
    """Yield a table with one row a figure."""
    from kvhearth_lab.bench.stalls.figures import FIGURES

    heads = ("figure", "ms", "spread", "target", "ok", "in", "what")
    made = table(*heads, right=("ms", "target"))
    for each in FIGURES:
        value, call = found[each.name], found["calls"].get(each.name, "")
        ok, around = _ok(each, value), _around(found, each.name)
        row(made, each.name, f"{value:g}", around, each.target, ok, call, each.what)
    balanced = found["books"]["balanced"]
    row(made, "books", "", "", "balanced", "yes" if balanced else "NO", "", "recounted at the end")
    yield made


def gpu(
    as_json: AsJson = False,
    plot: Plot = None,
    quick: Annotated[
        bool, _quick("Measure the bandwidth of fewer cells, and prompts up to 16k tokens.")
    ] = False,
    rehearse: Annotated[
        bool,
        typer.Option(
            "--rehearse",
            help="Run small sizes on the CPU, without a GPU; the figures mean nothing.",
        ),
    ] = False,
) -> None:
    """Measure copies between a GPU and the arena against pinned memory, and the
    time to the first token of an 8B Llama whose prompt is computed or loaded.

    Starts its own daemon and engines, on the first CUDA device. Takes up to a
    fifth of an hour, 12 GiB of memory and 30 GiB of the device. Missing a
    target is not an error: `missed` names those figures.
    """
    from kvhearth_lab.bench.gpu.figures import draw
    from kvhearth_lab.bench.gpu.run import run

    _check(plot)
    with cleaned_up():
        found = {**run(quick=quick, rehearse=rehearse), "quick": quick}
    _report(found, gpu_tables(found), draw, plot, as_json=as_json, beside=True)


def gpu_tables(found: Found) -> Iterator[Table]:
    """Yield the figures, the rows of the bandwidth, and those of the prompts."""
    from kvhearth_lab.bench.gpu.figures import BENCH_FIGURES

    if not found["rehearsal"]:
        yield _figure_table(found, BENCH_FIGURES)
    columns = ("layout", "blocks", "scattered", "direction", "method")
    numbers = ("gbs", "ratio", "call_us_block", "cpu_us_block")
    made = table(*columns, *numbers, right=("blocks", *numbers))
    for each in found["bandwidth"]["rows"]:
        row(made, *(str(each[name]) for name in columns), *(_text(each[name]) for name in numbers))
    yield made
    names = ("cold_s", "warm_s", "ratio", "lookup_s", "logit_diff_max")
    prompts = table("tokens", *names, right=("tokens", *names))
    prompts.title, prompts.title_justify = found["ttft"]["model"], "left"
    for tokens, each in found["ttft"]["rows"].items():
        row(prompts, tokens, *(_text(each[name], 4) for name in names))
    yield prompts
    skipped = {**found["bandwidth"]["unmeasured"], **found["ttft"]["left_out"]}
    yield from _skipped({"skipped": skipped})


EnginePython = Annotated[
    Path,
    typer.Option(
        "--engine-python", help="Python interpreter with vLLM and kvhearth.", metavar="PYTHON"
    ),
]
Models = Annotated[
    Path,
    typer.Option(
        "--models",
        help="Directory of models; uses `mid` (made by tests/engines/models.py).",
        metavar="DIR",
    ),
]
DtypeOption = Annotated[
    Dtype,
    typer.Option(
        "--dtype", help="Dtype of weights and KV cache. In bfloat16 tokens may differ on near-ties."
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(
        "--threads",
        help="Compute threads of each engine (default: one fewer than there are cores, as in "
        "vLLM). vLLM's scheduler busy-waits meanwhile; a step takes several times as long if it "
        "shares a core with a compute thread.",
        min=1,
        show_default=False,
    ),
]


def ttft(
    *,
    engine_python: EnginePython,
    models: Models,
    lmcache: Annotated[
        Path | None, _python("--lmcache", "Python interpreter with vLLM and lmcache.")
    ] = None,
    dtype: DtypeOption = Dtype.FLOAT32,
    as_json: AsJson = False,
    plot: Plot = None,
    threads: Threads = None,
    quick: Annotated[bool, _quick("Run one length and two rounds, as a smoke test.")] = False,
) -> None:
    """Measure the time to the first token: computed, from the engine's own
    memory, from KVHearth, and after a restart of the engine; and the
    connector's cost without a hit.

    After each restart every engine first answers two short prompts that no
    cache keeps, as for a readiness probe; `first_requests` gives their times.
    Figures after a restart have as many samples as figures before it.

    Starts its own daemons and up to three engines at once, of some 2 GiB each.
    A peer that cannot be measured is not an error: `skipped` gives the reason.
    """
    from kvhearth_lab.bench.ttft.figures import MODEL, draw, sizes_of
    from kvhearth_lab.bench.ttft.run import Given, run

    _check(plot)
    if not os.access(engine_python, os.X_OK):
        raise _bad(f"--engine-python: no interpreter at {engine_python}")
    if not (models / MODEL / "config.json").is_file():
        raise _bad(f"--models: no model at {models / MODEL}")
    with cleaned_up():  # includes the engines
        threads = threads or max(len(os.sched_getaffinity(0)) - 1, 1)
        given = Given(engine_python, models.resolve(), lmcache, threads)
        found = {**run(sizes_of(quick=quick, dtype=dtype.value), given, note), "quick": quick}
    _report(found, ttft_tables(found), draw, plot, as_json=as_json, beside=True)


def ttft_tables(found: Found) -> Iterator[Table]:
    """Yield a table with one row a figure, and a table of further notes."""
    from kvhearth_lab.bench.ttft.figures import figure_list

    made = _figure_table(found, figure_list(found["sizes"]["prompt_tokens"]), digits=4)
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


def scheduler(
    *,
    engine_python: EnginePython,
    as_json: AsJson = False,
    plot: Plot = None,
    quick: Annotated[bool, _quick("Run few requests of short prompts, as a smoke test.")] = False,
) -> None:
    """Measure the processor time of vLLM's scheduler thread: its steps with
    KVHearth's connector, with vLLM's own offloading, and with none, in turns.

    The scheduler is vLLM's own and the daemon is real; the workers are faked and
    copy nothing. Starts its own daemons and three engines without a model.
    """
    from kvhearth_lab.bench.scheduler.figures import FULL, QUICK, draw
    from kvhearth_lab.bench.scheduler.run import run

    _check(plot)
    if not os.access(engine_python, os.X_OK):
        raise _bad(f"--engine-python: no interpreter at {engine_python}")
    with cleaned_up():
        found = {**run(engine_python, QUICK if quick else FULL, note), "quick": quick}
    _report(found, scheduler_tables(found), draw, plot, as_json=as_json, beside=True)


def scheduler_tables(found: Found) -> Iterator[Table]:
    """Yield the figures, then each side's times."""
    from kvhearth_lab.bench.scheduler.figures import FIGURES

    yield _figure_table(found, FIGURES)
    heads = ("tokens", "side", "decode step us", "in it us", "full hit us", "zero hit us", "again")
    made = table(*heads, right=heads[2:])
    for prompt, sides in found["sides"].items():
        for side, values in sides.items():
            decode, hit, zero = values["decode"], values["full_hits"], values["zero_hits"]
            times = decode["step_us"], decode["connector_us"], hit["admission_us"]
            row(made, prompt, side, *map(_text, (*times, zero["admission_us"], hit["deferred"])))
    yield made


# -- parts of several ------------------------------------------------------------------------------


def _report(
    found: Found,
    tables: Iterable[Table],
    draw: Callable[[Found, Path], None] | None = None,
    plot: Path | None = None,
    *,
    as_json: bool,
    beside: bool,
) -> None:
    """Print the object or the tables, then draw.

    Args:
        beside: with --json, print the tables on stderr for a person; stdout holds only the object.
    """
    if not as_json or beside:
        to = Console(stderr=True, width=_WIDTH, highlight=False) if as_json else console()
        for each in tables:
            to.print(each)
    if as_json:
        say_json(found)
    if (
        draw is not None and plot is not None
    ):  # last: results measured in minutes are printed even if this fails
        draw(found, plot)
        note(f"drawn into {plot}")


def _check(plot: Path | None) -> None:
    from kvhearth_lab.bench.report import require_plotter

    if plot is not None:
        require_plotter()


def _figure_table(found: Found, figures: Iterable[Figure], digits: int = 6) -> Table:
    made = table("figure", "value", "spread", "target", "ok", "what", right=("value", "target"))
    for each in figures:
        value = found.get(each.name)
        cells = _text(value, digits), _around(found, each.name), each.target, _ok(each, value)
        row(made, each.name, *cells, each.what)
    return made


def _skipped(found: Found) -> Iterator[Table]:
    if found["skipped"]:
        made = table("skipped", "why")
        for name, reason in found["skipped"].items():
            row(made, name, reason)
        yield made


def _ok(figure: Figure, value: object) -> str:
    good = figure.good(value)
    return "" if good is None else "yes" if good else "NO"


def _around(found: Found, name: str) -> str:
    spread = found["spread"].get(name)
    return "" if spread is None else f"{spread[0]:g} .. {spread[1]:g}"


def _text(value: object, digits: int = 6) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,.{digits}g}" if isinstance(value, int | float) else "-"


def _bytes(text: str | None) -> int | None:
    try:
        return None if text is None else parse_size(text)
    except ValueError as error:
        raise _bad(f"--memory: {error}") from None


def _bad(problem: str) -> KVHearthError:
    return KVHearthError(Reason.CONFIG_INVALID, problem)
