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
from hypothesis import HealthCheck, seed, settings
from hypothesis.stateful import run_state_machine_as_test
from support.machine_reads import ReadingRules
from support.machine_refusals import RefusalRules
from support.machine_writes import WritingRules

SOAK_S = float(os.environ.get("KVHEARTH_SOAK_S", "60"))
SETTINGS = settings(
    deadline=None,
    print_blob=True,
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)


class CoreMachine(WritingRules, ReadingRules, RefusalRules):
    """The rules of all groups together."""


def test_the_core_against_a_model() -> None:
    run_state_machine_as_test(
        CoreMachine,
        settings=settings(
            SETTINGS, max_examples=settings.default.max_examples + 20, stateful_step_count=50
        ),
    )


@pytest.mark.slow
@pytest.mark.timeout(SOAK_S + 600)
def test_the_core_against_a_model_for_long() -> None:
    end, number = time.monotonic() + SOAK_S, int(os.environ.get("KVHEARTH_SOAK_SEED", "0"))
    number = number or int(time.time())
    while time.monotonic() < end:
        print(f"KVHEARTH_SOAK_SEED={number}", flush=True)
        run_state_machine_as_test(
            seed(number)(type("Seeded", (CoreMachine,), {})),
            settings=settings(SETTINGS, max_examples=50, stateful_step_count=100, database=None),
        )
        number += 1
