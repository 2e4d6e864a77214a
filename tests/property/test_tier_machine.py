"""Random engines and a lower tier that may reject, fail, hang and forget, but never lies.

A failure prints the steps and a blob that repeats them.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test
from support.machine_tier import TierMachine

SETTINGS = settings(
    deadline=None,
    print_blob=True,
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)


def test_a_core_with_a_slower_tier() -> None:
    run_state_machine_as_test(
        TierMachine, settings=settings(SETTINGS, max_examples=25, stateful_step_count=40)
    )
