"""``kvhearth size``: how much memory and SSD a model needs, and what a fleet needs."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from kvhearth.errors import KVHearthError, Reason
from kvhearth_server.cli.output import AsJson, console, facts, percent, row, say_json, size, table
from kvhearth_server.config.value_types import parse_size
from kvhearth_server.sizing.fleet import Constants, Fleet, FleetNeeds, fleet_needs
from kvhearth_server.sizing.model import ModelKv, model_kv

EPILOG = (
    "Example: kvhearth size --model config.json --set conversations=500; "
    "kvhearth size --fleet --set hosts=100 --set bytes=1000TB"
)
_SPARE = 0.2
"""Part of memory that leases, reservations and slack may take."""
_STEP = 1 << 30
_LARGEST = 1e24
_MAY_BE_0 = {"idle", "known_fraction", "remote_fraction", "gets_dollars", "puts_dollars"}
T = TypeVar("T")


Model = Annotated[
    Path | None,
    typer.Option("--model", help="The model's config.json, or its directory.", metavar="FILE"),
]
Assume = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="A figure to calculate with; repeatable. With --model: context=8192 "
        "conversations=200 idle=2000. With --fleet: hosts=1000 bytes=10000TB requests_per_s=50 "
        "keys=512 block_bytes=2MiB, and the others that --json prints.",
        metavar="NAME=VALUE",
    ),
]


def sized(
    *,
    model: Model = None,
    fleet: Annotated[
        bool, typer.Option("--fleet", help="Hosts that share a remote tier: what breaks first.")
    ] = False,
    kv_dtype: Annotated[
        str, typer.Option("--kv-dtype", help="Dtype of the KV cache: auto, bfloat16, fp8, ...")
    ] = "auto",
    codec: Annotated[str, typer.Option("--codec", help="Codec at rest: fp8 or int4.")] = "",
    tensor_parallel: Annotated[
        int, typer.Option("--tensor-parallel", min=1, help="Ranks of the engine.")
    ] = 1,
    assume: Assume = None,
    as_json: AsJson = False,
) -> None:
    """Compute bytes per token of a model and suggest sizes; or size a fleet.

    With --model: from its Hugging Face config.json; memory for conversations that
    continue within minutes, SSD for those that are idle for longer. With --fleet:
    metadata, calls, network and cost of a remote tier that many hosts share.
    Once a daemon has real load, kvhearth mrc tells more than any calculation.
    """
    if (model is None) == (not fleet):
        raise KVHearthError(Reason.CONFIG_INVALID, "give either --model FILE or --fleet")
    if model is None:
        own = _assumed(Fleet(), assume, (Fleet, Constants))
        costs = _assumed(Constants(), assume, (Fleet, Constants))
        needs = fleet_needs(own, costs)
        if as_json:
            say_json(_fleet_json(own, costs, needs))
        else:
            _print_fleet(needs)
        return
    use = _assumed(Conversations(), assume, (Conversations,))
    found = model_kv(_config(model), kv_dtype, codec, tensor_parallel)
    memory, ssd = suggestion(found, use)
    if as_json:
        say_json(
            {
                **asdict(found),
                **asdict(use),
                "tokens_per_gib": found.tokens_per_gib,
                "context_bytes": found.context_bytes(use.context),
                "suggested_memory_bytes": memory,
                "suggested_ssd_bytes": ssd,
            }
        )
    else:
        _print_model(found, use.context, memory, ssd)


@dataclass(frozen=True)
class Conversations:
    """Load of one host: tokens of a conversation, those that continue soon, and those later."""

    context: int = 8192
    conversations: int = 200
    idle: int = 2000


def _assumed(usual: T, words: list[str] | None, kinds: Sequence[type]) -> T:
    """Return a dataclass of numbers with the fields that the user set.

    Raises:
        KVHearthError: ``config_invalid`` for a name that none of ``kinds`` has, or no number.
    """
    fields = {each.name: each for kind in kinds for each in dataclasses.fields(kind)}
    changes: dict[str, float] = {}
    for word in words or []:
        name, _, text = word.partition("=")
        if name not in fields:
            known = ", ".join(fields)
            raise KVHearthError(Reason.CONFIG_INVALID, f"--set: no {name!r}; there are: {known}")
        whole = str(fields[name].type) == "int"
        try:
            value = parse_size(text) if whole or text[-1:].isalpha() else float(text)
        except ValueError as error:
            raise KVHearthError(Reason.CONFIG_INVALID, f"--set: {word!r}: {error}") from None
        if not 0 <= value < _LARGEST or (value == 0 and name not in _MAY_BE_0):
            raise KVHearthError(Reason.CONFIG_INVALID, f"--set: {word!r} must be above 0")
        if hasattr(usual, name):
            changes[name] = value
    return dataclasses.replace(usual, **changes)  # type: ignore[type-var]


def _fleet_json(own: Fleet, costs: Constants, needs: FleetNeeds) -> dict[str, object]:
    bounds = [{**asdict(each), "ratio": round(each.ratio, 3)} for each in needs.bounds]
    return {
        "fleet": asdict(own),
        "constants": asdict(costs),
        "needs": {**asdict(needs), "bounds": bounds},
        "breaks_first": needs.breaks_first,
    }


def suggestion(found: ModelKv, use: Conversations) -> tuple[int, int]:
    """Return the bytes of memory for active conversations, and of SSD for all; whole GiB."""
    # Stores write every token's KV, also of windows that a hit does not load.
    one = use.context * found.bytes_per_token / (1 - _SPARE)
    memory = _whole(use.conversations * one)
    return memory, _whole((use.conversations + use.idle) * one) if use.idle else 0


def _whole(size_bytes: float) -> int:
    return math.ceil(size_bytes / _STEP) * _STEP


def _config(path: Path) -> dict[str, object]:
    file = path / "config.json" if path.is_dir() else path
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise KVHearthError(Reason.CONFIG_INVALID, f"--model: {file}: {reason}") from None
    if not isinstance(found, dict):
        raise KVHearthError(Reason.CONFIG_INVALID, f"--model: {file} is no JSON object")
    return found


def _print_model(found: ModelKv, context: int, memory: int, ssd: int) -> None:
    layers = [f"{found.full_layers} full"]
    if found.sliding_layers:
        layers.append(f"{found.sliding_layers} with a window of {found.window_tokens} tokens")
    if found.state_layers:
        layers.append(f"{found.state_layers} with a state (its size is not counted)")
    dtype = found.kv_dtype + (f", {found.codec} at rest" if found.codec else "")
    rows: list[tuple[str, object]] = [
        ("model", f"{found.model_type}, {found.attention}"),
        ("KV", dtype),
        ("layers", ", ".join(layers)),
        ("bytes per token", f"{found.bytes_per_token:.0f}"),
        ("tokens per GiB", found.tokens_per_gib),
        (f"{context} tokens", f"{size(found.context_bytes(context))} are loaded for a hit"),
        ("memory", size(memory)),
    ]
    if ssd:
        rows.append(("SSD", size(ssd)))
    console().print(facts(rows))
    words = f"kvhearth serve --memory {memory >> 30}GiB"
    if ssd:
        words += f" --ssd-dir /var/lib/kvhearth={ssd >> 30}GiB"
    typer.echo(f"\n{words}")


def _print_fleet(needs: FleetNeeds) -> None:
    rows: list[tuple[str, object]] = [
        ("objects", f"{needs.objects:,}"),
        ("metadata", f"{size(needs.master_metadata_bytes)} at one master"),
        ("", f"{size(needs.value_metadata_bytes)} beside values of a key-value store"),
        ("every key asked for", f"{needs.naive_keys_per_s:,.0f} keys/s"),
        ("", f"{needs.naive_cores:.1f} cores, or $ {needs.naive_dollars_per_day:,.0f} a day"),
        ("by halving", f"{needs.calls_per_s:,.0f} calls/s, {needs.calls_cores:.1f} cores"),
        (
            "and remembering",
            f"{needs.asked_calls_per_s:,.0f} calls/s, {needs.asked_cores:.2f} cores",
        ),
        (
            "",
            f"{needs.requests_per_s:,.0f} requests/s at an object store, {needs.prefixes} prefixes",
        ),
        ("", f"$ {needs.requests_dollars_per_day:,.0f} a day"),
        ("loads", f"{size(round(needs.load_bytes_per_s))}/s"),
        ("of one host", f"{size(round(needs.host_load_bytes_per_s))}/s"),
        ("writes", f"{needs.puts_per_s:,.0f}/s, $ {needs.puts_dollars_per_week:,.0f} a week"),
        ("one prompt for all", f"{needs.fan_in_s:.0f} s from one holder"),
    ]
    console().print(facts(rows))
    shown = table("bound", "used", "needed", "there is", "instead", right=("used",))
    for each in needs.bounds:
        amounts = [
            size(round(value)) + each.unit.removeprefix("bytes")
            if each.unit.startswith("bytes")
            else f"{value:.1f} {each.unit}"
            for value in (each.need, each.there_is)
        ]
        row(shown, each.name, percent(each.need, each.there_is), *amounts, each.instead)
    typer.echo("")
    console().print(shown)
    first = needs.breaks_first
    typer.echo(f"\nbreaks first: {first}" if first else "\nnothing breaks")
