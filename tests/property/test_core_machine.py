"""Random clients against core, engine and journal, compared with a plain model.

The adversary is the worst one allowed: after every step, every client that may write to a slot has
written garbage to it (attached ranks before their commit, ranks that vanished until they are
drained, engines that outlived the daemon). The daemon is killed between calls and inside the
journal's operations. Nevertheless every served block must be the one committed under that key, in
that namespace and epoch; checksums are not consulted for it.

A failure prints the steps and a blob that repeats them; the slow test also prints its seed.
"""

from __future__ import annotations

import os
import time

import pytest
from support.machine_base import run_machine
from support.machine_reads import ReadingRules
from support.machine_refusals import RefusalRules
from support.machine_writes import WritingRules

SOAK_S = float(os.environ.get("KVHEARTH_SOAK_S", "60"))


class CoreMachine(WritingRules, ReadingRules, RefusalRules):
    """The rules of all groups together."""


@pytest.mark.parametrize("number", range(8))
def test_the_core_against_a_model(number: int) -> None:
    run_machine(CoreMachine, number, examples=10, steps=50)


@pytest.mark.slow
@pytest.mark.timeout(SOAK_S + 600)
def test_the_core_against_a_model_for_long() -> None:
    end, number = time.monotonic() + SOAK_S, int(os.environ.get("KVHEARTH_SOAK_SEED", "0"))
    number = number or int(time.time())
    while time.monotonic() < end:
        print(f"KVHEARTH_SOAK_SEED={number}", flush=True)
        run_machine(CoreMachine, number, examples=50, steps=100)
        number += 1
