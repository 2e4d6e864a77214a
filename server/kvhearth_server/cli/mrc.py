"""``kvhearth mrc``: what more memory, or a larger SSD tier, would bring."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from kvhearth.errors import KVHearthError, Reason
from kvhearth_server.cli.admin_client import daemon_at
from kvhearth_server.cli.output import (
    AsJson,
    SocketDir,
    console,
    note,
    percent,
    plain,
    row,
    say_json,
    size,
    table,
)
from kvhearth_server.engine.miss_ratio import Curve

EPILOG = "Example: kvhearth mrc; kvhearth mrc --json | jq '.curves[0].memory'"
FEW_KEYS = 10_000
"""Keys looked up below which the curve says little."""
GAIN_LEAST = 0.02
"""Rise of the hit ratio from which more memory is recommended."""


def mrc(
    socket_dir: SocketDir = None,
    namespace: Annotated[
        str, typer.Option("--namespace", help="Only of namespaces that start with these digits.")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Show the hit ratio at 0.5, 1, 2 and 4 times the present memory and SSD.

    An estimate for the lookups of the last hour or so, as an LRU cache would
    have served them, from a sample of the keys (AET). Keys that nobody
    asked for before are misses at every size.
    """
    found = daemon_at(socket_dir).stats()
    curves = [
        each
        for each in found.curves
        if not namespace or each.namespace.startswith(namespace.lower())
    ]
    if namespace and not curves:
        known = ", ".join(each.namespace for each in found.curves) or "none"
        raise KVHearthError(
            Reason.UNKNOWN_NAMESPACE, f"no curve of a namespace {namespace!r}; there are: {known}"
        )
    if as_json:
        say_json({"boot_id": found.boot_id, "curves": [plain(each) for each in curves]})
        return
    if not any(each.asked_keys for each in curves):
        note("nobody has looked anything up yet")
        return
    _print(curves)


def _print(curves: Sequence[Curve]) -> None:
    out = console()
    for ssd in (False, True):
        rows = [(each, each.ssd if ssd else each.memory) for each in curves if each.asked_keys]
        rows = [(each, ratios) for each, ratios in rows if ratios]
        if not rows:
            continue
        heads = [f"{ratio.factor:g} x" for ratio in rows[0][1]]
        what = "SSD with the present memory" if ssd else "memory alone"
        shown = table("tenant", "namespace", "keys asked", *heads, right=("keys asked", *heads))
        for each, ratios in rows:
            cells = [percent(ratio.hit_ratio, 1) for ratio in ratios]
            row(shown, each.tenant, each.namespace, str(each.asked_keys), *cells)
        now = size(rows[0][0].ssd_bytes if ssd else rows[0][0].memory_bytes)
        out.print(f"Hit ratio by {what} (1 x: {now})")
        out.print(shown)
        out.print()
    for each in curves:
        if each.namespace == "all" and each.asked_keys:
            typer.echo(verdict(each))


def verdict(curve: Curve) -> str:
    """Return a sentence that says whether more memory would help."""
    about = f"tenant {curve.tenant}: {curve.sampled_keys} keys tracked"
    if curve.asked_keys < FEW_KEYS:
        return f"{about}; only {curve.asked_keys} keys asked so far, too few to trust the figures"
    by_factor = {each.factor: each for each in curve.memory}
    gain = by_factor[2.0].hit_ratio - by_factor[1.0].hit_ratio
    more, loss = size(by_factor[2.0].bytes), by_factor[1.0].hit_ratio - by_factor[0.5].hit_ratio
    if gain >= GAIN_LEAST:
        return f"{about}; {more} of memory would raise the hit ratio by {100 * gain:.1f} points"
    if loss < GAIN_LEAST:
        less = size(by_factor[0.5].bytes)
        return f"{about}; memory is ample: {less} would lose {100 * max(0.0, loss):.1f} points"
    return f"{about}; memory is enough: {more} would bring {100 * max(0.0, gain):.1f} points"
