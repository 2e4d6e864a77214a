"""Runs ``kvhearth bench gpu``: bandwidth, then the time to the first token."""

from __future__ import annotations

import time
from typing import Any

from kvhearth.errors import KVHearthError, Reason
from kvhearth.version import __version__
from kvhearth_lab.bench.gpu import bandwidth, ttft
from kvhearth_lab.bench.gpu.figures import BENCH_FIGURES, judged
from kvhearth_lab.bench.gpu.stage import CudaStage, HostStage, Stage, device_problem
from kvhearth_lab.bench.report import machine

BANDWIDTH_S = 120.0
QUICK_S = 30.0
TTFT_S = 600.0
"""Bounds of the parts; cells for which no time is left are counted."""


def run(*, quick: bool = False, rehearse: bool = False, plain: bool = False) -> dict[str, Any]:
    """Run both parts.

    Args:
        quick: measure fewer cells, and no prompt longer than that with a target.
        rehearse: run small sizes on the CPU; the figures mean nothing.
        plain: use a model of plain torch although transformers is installed.

    Raises:
        KVHearthError: ``config_invalid`` without a CUDA device.
    """
    problem = "" if rehearse else device_problem()
    if problem:
        raise KVHearthError(Reason.CONFIG_INVALID, f"{problem}; --rehearse runs without one")
    stage: Stage = HostStage() if rehearse else CudaStage()
    until = time.monotonic() + (QUICK_S if quick else BANDWIDTH_S)
    copies = bandwidth.measure(
        stage,
        bandwidth.REHEARSAL if rehearse else bandwidth.FULL,
        lambda: until - time.monotonic(),
    )
    end = time.monotonic() + TTFT_S
    prompts = ttft.REHEARSAL if rehearse else ttft.QUICK if quick else ttft.FULL
    first = ttft.measure(
        stage,
        prompts,
        lambda: end - time.monotonic(),
        plain=plain,
    )
    figures = {**copies["figures"], **first["figures"]}
    verdict = judged({} if rehearse else figures, BENCH_FIGURES)
    return {
        "version": __version__,
        "machine": {**machine(), "device": _device_name(stage)},
        "rehearsal": rehearse,
        **figures,
        "spread": copies["spread"],
        "missed": verdict["missed"],
        "not_measured": verdict["not_measured"],
        "bandwidth": copies,
        "ttft": first,
    }


def _device_name(stage: Stage) -> str:
    return str(stage.torch.cuda.get_device_name(0)) if stage.real else "cpu"
