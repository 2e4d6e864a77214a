"""``kvhearth trace``: records lookups and stores of a daemon, and simulates other sizes offline."""

from __future__ import annotations

import contextlib
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from kvhearth.errors import KVHearthError, Reason
from kvhearth.proto.v1 import admin_pb2
from kvhearth_server.cli.admin_client import AdminClient
from kvhearth_server.cli.mrc import plot_lines
from kvhearth_server.cli.output import (
    AsJson,
    SocketDir,
    console,
    note,
    percent,
    progress,
    row,
    say_json,
    size,
    table,
)
from kvhearth_server.config.value_types import parse_size
from kvhearth_server.traces.format import Trace, TraceSpace, TraceWriter, read_trace
from kvhearth_server.traces.simulate import (
    POLICIES,
    Miniature,
    Simulated,
    sample_rate,
    simulate,
)

EPILOG = "Example: kvhearth trace record day.trace --seconds 3600"
RECORD_EPILOG = "Example: kvhearth trace record day.trace --seconds 3600 --max-bytes 1GiB"
SIMULATE_EPILOG = (
    "Example: kvhearth trace simulate day.trace --memory 64GiB,128GiB --ssd 0,2TiB --plot"
)
FACTORS = (0.5, 1.0, 2.0, 4.0)
_POLL_S = 0.2
_MARKS = "*o+x@#%&"

TraceFile = Annotated[Path, typer.Argument(help="The trace.", metavar="FILE")]


def record(
    file: Annotated[Path, typer.Argument(help="File to make.", metavar="FILE")],
    socket_dir: SocketDir = None,
    seconds: Annotated[
        float, typer.Option("--seconds", min=0.1, help="Time to record; Ctrl-C ends it earlier.")
    ] = 60.0,
    max_bytes: Annotated[
        str, typer.Option("--max-bytes", help="Stop at this size of the file.", metavar="SIZE")
    ] = "1GiB",
    salt_file: Annotated[
        Path | None,
        typer.Option(
            "--salt-file",
            help="File with a salt, so that traces can be compared. Default: a new salt each time.",
            metavar="FILE",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Record the lookups and stores of a daemon into a file.

    The file has salted hashes of the engines' keys, sizes and times: no prompts,
    no tokens, no KV. What was recorded until an interruption can be used.
    """
    bytes_max, salt = _size("--max-bytes", max_bytes), b""
    if salt_file is not None:
        try:
            salt = salt_file.read_bytes()
        except OSError as error:
            message = f"--salt-file: cannot read {salt_file}: {error.strerror}"
            raise KVHearthError(Reason.CONFIG_INVALID, message) from None
    with AdminClient(socket_dir) as daemon:
        reply = daemon.record_trace(0)
        facts = {
            "memory_bytes": reply.memory_bytes,
            "ssd_bytes": reply.ssd_bytes,
            "recorded_at_s": int(time.time()),
        }
        with TraceWriter(file, facts, salt) as writer:
            lost = _record(daemon, reply, writer, seconds, bytes_max)
    found = {
        "file": str(file),
        "bytes": writer.bytes,
        "lookups": writer.lookups,
        "stores": writer.stores,
        "keys": writer.keys,
        "distinct_keys": writer.distinct_keys,
        "lost_keys": lost,
    }
    if as_json:
        say_json(found)
        return
    typer.echo(
        f"{file}: {writer.lookups} lookups and {writer.stores} stores of {writer.distinct_keys} "
        f"different keys, {size(writer.bytes)}"
    )
    if lost:
        note(f"{lost} keys were lost: the daemon was busier than this command could follow")


def _record(
    daemon: AdminClient,
    reply: admin_pb2.RecordTraceResponse,
    writer: TraceWriter,
    seconds: float,
    bytes_max: int,
) -> int:
    """Write what the daemon tells until the time is over; return the number of lost keys."""
    number, began = reply.recording, time.monotonic()
    key_bytes: dict[int, int] = {}
    lost, over = _write(reply, writer, key_bytes), False
    with progress() as told, contextlib.suppress(KeyboardInterrupt):
        while not over:
            passed = time.monotonic() - began
            told(f"{writer.lookups} lookups, {size(writer.bytes)}", passed / seconds)
            time.sleep(0 if reply.more else min(_POLL_S, max(0.0, seconds - passed)))
            reply = daemon.record_trace(number)
            lost += _write(reply, writer, key_bytes)
            over = passed >= seconds or writer.bytes >= bytes_max
    more = True
    while more:
        reply = daemon.record_trace(number, end=True)
        lost += _write(reply, writer, key_bytes)
        more = reply.more
    return lost


def _write(
    reply: admin_pb2.RecordTraceResponse, writer: TraceWriter, key_bytes: dict[int, int]
) -> int:
    """Write one answer; return the number of keys that the daemon lost before it."""
    for each in reply.spaces:
        contract = json.loads(each.contract_json)
        contract.pop("hash_seed", None)  # with it, keys follow from tokens
        key_bytes[each.number] = contract["hash_bytes"]
        space = TraceSpace(
            each.namespace, each.tenant, each.epoch, each.group, each.block_bytes, contract
        )
        writer.space(each.number, space)
    for use in reply.accesses:
        writer.use(use.space, use.at_us, use.keys, key_bytes[use.space], store=use.store)
    if reply.lost_keys:
        writer.lost(reply.lost_keys)
    return reply.lost_keys


Memory = Annotated[
    str,
    typer.Option(
        "--memory",
        help="Sizes of memory, separated by commas. Default: 0.5, 1, 2, 4 times the recorded one.",
        metavar="SIZES",
    ),
]
Ssd = Annotated[
    str,
    typer.Option(
        "--ssd",
        help="Sizes of the SSD tier, separated by commas; 0: none. Default: the recorded one.",
        metavar="SIZES",
    ),
]
Policy = Annotated[
    str,
    typer.Option("--policy", help=f"Policies, separated by commas: {', '.join(POLICIES)}."),
]
Sample = Annotated[
    float,
    typer.Option(
        "--sample",
        min=0,
        max=1,
        help="Part of the keys to simulate, 1 for all. Default: what a few seconds are enough for.",
        show_default=False,
    ),
]


def simulated(
    file: TraceFile,
    memory: Memory = "",
    ssd: Ssd = "",
    policy: Policy = "s3fifo,lru",
    sample: Sample = 0.0,
    plot: Annotated[
        bool, typer.Option("--plot", help="Draw the hit ratios over memory, too.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Simulate other sizes and policies on a trace, without a daemon.

    Uses the daemon's own index and eviction policies. Every block that a
    lookup misses is stored. Hit ratios are parts of all keys looked up.
    """
    trace = read_trace(file)
    if trace.cut:
        note(f"{file} ends in the middle: its recorder was killed; the rest is used")
    if not trace.asked_keys:
        raise KVHearthError(Reason.CONFIG_INVALID, f"{file} has no lookups; record for longer")
    present, present_ssd = _fact(trace, "memory_bytes"), _fact(trace, "ssd_bytes")
    memories = _sizes("--memory", memory) or [int(present * factor) for factor in FACTORS]
    ssds = _sizes("--ssd", ssd) or [present_ssd]
    policies = [word.strip() for word in policy.split(",") if word.strip()]
    cases = [(one, below, bytes_) for one in policies for below in ssds for bytes_ in memories]
    parts: dict[float, Miniature] = {}
    results = list[Simulated]()
    with progress() as told:
        for number, (one, below, bytes_) in enumerate(cases):

            def noted(done: float, number: int = number, name: str = one) -> None:
                told(f"{name}: {number + 1} of {len(cases)}", (number + done) / len(cases))

            rate = sample or sample_rate(trace, max(1, bytes_))
            part = parts.get(rate) or parts.setdefault(rate, Miniature(trace, rate))
            results.append(simulate(part, one, bytes_, below, noted))
    if as_json:
        say_json(
            {
                "lookups": trace.lookups,
                "asked_keys": trace.asked_keys,
                "distinct_keys": len(trace.hashes),
                "seconds": trace.seconds,
                "lost_keys": trace.lost_keys,
                "memory_bytes": present,
                "ssd_bytes": present_ssd,
                "results": [asdict(each) for each in results],
            }
        )
        return
    _print(trace, results, present, plot=plot)


def _print(trace: Trace, results: list[Simulated], present: int, *, plot: bool) -> None:
    out = console()
    typer.echo(
        f"{trace.lookups} lookups of {trace.asked_keys} keys in {trace.seconds:.0f} s, "
        f"{len(trace.hashes)} different keys, at most "
        f"{percent(max(each.sample_rate for each in results), 1)} simulated"
    )
    heads = ("policy", "memory", "ssd", "hit ratio", "from memory", "evicted")
    shown = table(*heads, right=heads[1:])
    for each in results:
        row(
            shown,
            each.policy,
            size(each.memory_bytes),
            size(each.ssd_bytes) if each.ssd_bytes else "-",
            percent(each.hit_ratio, 1),
            percent(each.memory_hit_ratio, 1),
            "-" if each.policy == "lru" else str(each.evicted_blocks),
        )
    out.print(shown)
    if not plot:
        return
    curves: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for each in results:
        points = curves.setdefault((each.policy, each.ssd_bytes), [])
        points.append((each.memory_bytes, each.hit_ratio))
    for points in curves.values():
        points.sort()
    named = dict(zip(_MARKS, curves, strict=False))
    first, *others = [curves[name] for name in named.values()]
    lines = plot_lines(first, present, "".join(named), others)
    out.print("\n".join(["", *lines]), markup=False)
    for mark, (one, below) in named.items():
        typer.echo(f"       {mark} {one}" + (f", SSD of {size(below)}" if below else ""))


def _fact(trace: Trace, name: str) -> int:
    value = trace.facts.get(name)
    return value if isinstance(value, int) else 0


def _size(option: str, text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise KVHearthError(Reason.CONFIG_INVALID, f"{option}: {text!r}: {error}") from None


def _sizes(option: str, text: str) -> list[int]:
    return [_size(option, word.strip()) for word in text.split(",") if word.strip()]
