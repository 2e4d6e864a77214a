"""An engine in the caller's own process, as in reinforcement learning: no loop steps it.

Runs in a process that the engines' nursery forks; see ``harness``.
"""

from __future__ import annotations

import json
import os
from typing import Any

from engines.driver import taken
from vllm import LLM, SamplingParams


def run(out: int, go: int, log: int, options: dict[str, Any], prompts: list[list[int]]) -> int:
    """Run the prompts, reset, sleep and wake up; run them again and reset. Wait for a byte from
    ``go`` before each run, and write a line with the results to ``out`` after each.
    """
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    engine = LLM(**options)
    os.read(go, 1)
    reported: dict[str, Any] = {"first": _generate(engine, prompts)}
    reported["reset"] = engine.reset_prefix_cache()
    engine.sleep(level=1)
    engine.wake_up()
    with os.fdopen(out, "w") as file:
        print(json.dumps(reported), file=file, flush=True)
        os.read(go, 1)
        reported["second"] = _generate(engine, prompts)
        reported["reset_again"] = engine.reset_prefix_cache()
        print(json.dumps(reported), file=file, flush=True)
    engine.llm_engine.engine_core.shutdown()
    return 0


def _generate(engine: LLM, prompts: list[list[int]]) -> list[dict[str, Any]]:
    options = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=0)
    texts = [{"prompt_token_ids": each} for each in prompts]
    return [taken({"cached": 0}, each) for each in engine.generate(texts, options, use_tqdm=False)]
