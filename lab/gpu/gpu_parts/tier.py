"""Further part: a whole vLLM with its own offloading and ``KVHearthTier`` behind it.

Two engines after one another on one daemon: the second one must find the first one's blocks and
give the same answer. vLLM is not in the kit: where the machine has none, the part says so.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from gpu_parts.common import Report, run_part
from kvhearth_lab.bench.daemon import Served, served
from kvhearth_lab.bench.gpu.stage import Stage

ROOT = Path(__file__).resolve().parents[3]
CONFIG = ROOT / "deploy/examples/vllm_tier/kv-transfer-config.json"
PROMPT_TOKENS = 2000
PRIMARY_BYTES = 256 << 20
ENGINE = """
import json, sys
from vllm import LLM, SamplingParams
given = json.loads(sys.argv[1])
llm = LLM(given["model"], kv_transfer_config=given["config"], skip_tokenizer_init=True, seed=0,
          dtype="float32", max_model_len=4096, gpu_memory_utilization=0.3, enforce_eager=True)
options = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
(out,) = llm.generate([{"prompt_token_ids": given["prompt"]}], options, use_tqdm=False)
print(json.dumps({"tokens": list(out.outputs[0].token_ids), "cached": out.num_cached_tokens}))
sys.stdout.flush()
sys.stdin.readline()
"""


def configuration(url: str) -> dict[str, Any]:
    """Return the example's configuration with a small host memory, for a daemon."""
    config: dict[str, Any] = json.loads(CONFIG.read_text())
    extra = config["kv_connector_extra_config"]
    extra["cpu_bytes_to_use"] = PRIMARY_BYTES
    extra["secondary_tiers"][0]["url"] = url
    return config


def answer(report: Report, daemon: Served, model: Path) -> dict[str, Any]:
    """Return an engine's answer, once what it stored is in the daemon."""
    prompt = [3 + number * number % 200 for number in range(PROMPT_TOKENS)]
    given = {"model": str(model), "config": configuration(daemon.client_url), "prompt": prompt}
    with (
        tempfile.TemporaryFile() as log,
        subprocess.Popen(
            [sys.executable, "-c", ENGINE, json.dumps(given)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
        ) as process,
    ):
        assert process.stdout is not None
        while line := process.stdout.readline():
            if not line.startswith(b'{"tokens"'):
                continue
            settle(daemon, report)
            process.communicate(b"end\n", timeout=max(report.left_s(), 1.0))
            return dict(json.loads(line))
        log.seek(0)
        raise RuntimeError(log.read()[-2000:].decode(errors="replace"))


def settle(daemon: Served, report: Report) -> None:
    """Wait until the daemon has blocks, and no more of them come."""
    seen = -1
    while report.left_s() > 0:
        now = int(daemon.stats().counters.get("stored_blocks", 0))
        if now == seen > 0:
            return
        seen = now
        time.sleep(1.0)


def measure(report: Report, stage: Stage) -> None:
    """Run both engines; without a device or vLLM only the configuration is looked at."""
    tiers = configuration("kvhearth+unix:")["kv_connector_extra_config"]["secondary_tiers"]
    report.check("the example names the tier", tiers[0]["type"] == "KVHearthTier", tiers)
    if not stage.real:
        return
    if importlib.util.find_spec("vllm") is None:
        report.shorten("vLLM is not installed")
        return
    with tempfile.TemporaryDirectory() as folder, served(memory=1 << 30) as daemon:
        daemon.ready()
        model = Path(folder) / "tiny"
        words = [sys.executable, str(ROOT / "tests/engines/models.py"), str(model), "tiny"]
        subprocess.run(words, check=True, timeout=max(report.left_s(), 1.0), capture_output=True)
        first = answer(report, daemon, model)
        report.check("a cold engine computes", not first["cached"], first)
        second = answer(report, daemon, model)
        report.check("another engine finds the blocks", second["cached"] > 0, second)
        report.check("its answer is the same", second["tokens"] == first["tokens"], second)
    report.put(first=first, second=second)


if __name__ == "__main__":
    run_part(measure)
