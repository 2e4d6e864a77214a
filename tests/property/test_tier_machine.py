"""Random engines and a lower tier that may reject, fail, hang and forget, but never lies.

A failure prints the steps and a blob that repeats them.
"""

from __future__ import annotations

import pytest
from support.machine_base import run_machine
from support.machine_tier import TierMachine


@pytest.mark.parametrize("number", range(3))
def test_a_core_with_a_slower_tier(number: int) -> None:
    run_machine(TierMachine, number, examples=8, steps=40)
