"""vLLM's second model runner, the default on CUDA: its own side of the connector, on pages of the
CPU.
"""

from __future__ import annotations

from pathlib import Path

from engines.harness import arguments, connector, inside
from support.daemon import Daemon


def test_only_a_step_without_tokens_waits_for_a_load(logs: Path, daemon: Daemon) -> None:
    """The runner calls ``start_load_kv`` outside the forward pass, where there is no attention
    metadata even in a busy step.
    """
    engine = arguments(kv_transfer_config=connector(daemon))
    waits = inside(logs, "idle_waits", engine=engine)
    assert all(waits.values()), "each step looks after the load"
    assert max(waits["begun"]) == 0
    assert max(waits["busy"]) == 0
    assert max(waits["idle"]) > 0


def test_an_engine_with_the_connector_may_sleep(logs: Path, daemon: Daemon) -> None:
    """``test_inprocess`` puts one to sleep."""
    alone = connector(daemon)
    both = {**alone, "kv_connector": "MultiConnector", "kv_connector_extra_config": {}}
    both["kv_connector_extra_config"]["connectors"] = [alone]
    assert inside(logs, "may_sleep", transfers=[alone, both]) == [True, True]
