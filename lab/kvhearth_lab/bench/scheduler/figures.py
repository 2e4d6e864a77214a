"""Sizes and figures of ``kvhearth bench scheduler``: targets and plot."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvhearth_lab.bench.report import Figure, picture

SIDES = ("none", "kvhearth", "offloading")
"""No connector, KVHearth's, and vLLM's ``OffloadingConnector``."""
PHASES = ("zero_hits", "decode", "full_hits")


@dataclass(frozen=True)
class Sizes:
    """Counts and seconds of one run.

    Attributes:
        prompts: lengths of the prompts in tokens, the longest last.
        running: requests that run at the same time.
        each_step: requests that arrive in a step.
        rounds, steps: rounds of decode steps, in turns, and the steps of each.
        forward_s: time that the faked workers take for a step with tokens.
    """

    prompts: tuple[int, ...]
    running: int
    each_step: int
    rounds: int
    steps: int
    forward_s: float


FULL = Sizes(prompts=(1024, 8192), running=256, each_step=4, rounds=12, steps=32, forward_s=0.01)
QUICK = Sizes(prompts=(256, 1024), running=16, each_step=4, rounds=2, steps=32, forward_s=0.002)

FIGURES = (
    Figure("decode_step_share", "connector's part of a decode step, over the rest", "<=", 0.05),
    Figure("full_hit_admission_us", "in the connector, a full hit of the long prompts", "<=", 100),
    Figure("deferred_per_hit", "answers that a full hit had to come again for", "<=", 1),
    Figure("decode_vs_offloading", "connector's part of a step, ours over theirs", "<=", 1),
    Figure("decode_step_added", "the whole step over one without a connector, less 1"),
    Figure("zero_hit_admission_us", "in the connector, a prompt of which nothing is kept"),
)


def draw(found: Mapping[str, Any], path: Path) -> None:
    """Write the plot: a decode step of each side, and its part inside the connector; raises as
    ``picture``.
    """
    with picture(path, 11, 4) as (steps, admissions):
        names, whole, inside = [], [], []
        for prompt, sides in found["sides"].items():
            for side, values in sides.items():
                names.append(f"{side}, {prompt} tokens")
                whole.append(values["decode"]["step_us"])
                inside.append(values["decode"]["connector_us"])
        steps.barh(names, whole, color="tab:gray")
        steps.barh(names, inside, color="tab:orange")
        steps.set_title("a decode step, CPU microseconds (orange: in the connector)")
        for phase, colour in (("zero_hits", "tab:blue"), ("full_hits", "tab:green")):
            values = [
                side[phase]["admission_us"]
                for sides in found["sides"].values()
                for side in sides.values()
            ]
            admissions.barh(names, values, color=colour, alpha=0.6, label=phase.replace("_", " "))
        admissions.set_title("in the connector, CPU microseconds a request")
        admissions.legend()
        for axes in (steps, admissions):
            axes.invert_yaxis()
