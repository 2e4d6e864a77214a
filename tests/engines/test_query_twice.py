"""The example ``deploy/examples/query_twice``, by the README's three lines on ``vllm serve``."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

from engines.harness import PYTHON, ROOT
from engines.kit import wait_attached, wait_settled
from engines.serving import running_server, served
from support.daemon import Daemon

SCRIPT = ROOT / "deploy/examples/query_twice/query_twice.py"
CHARACTERS = 8000


def readme_flag() -> dict[str, object]:
    """The ``--kv-transfer-config`` that the README tells to start vLLM with."""
    (found,) = re.findall(
        r"^vllm serve MODEL --kv-transfer-config \\\n\s*'(\{.*\})'$",
        (ROOT / "README.md").read_text(),
        re.MULTILINE,
    )
    flag: dict[str, object] = json.loads(found)
    return flag


def test_the_second_answer_comes_from_kvhearth(daemon: Daemon, logs: Path) -> None:
    with running_server(logs, **served(daemon, readme_flag(), max_model_len=12_000)) as server:
        wait_attached(daemon)
        url = f"http://127.0.0.1:{server.port}"
        options = ["--url", url, "--pause", "4", "--characters", str(CHARACTERS)]
        done = subprocess.run(
            [PYTHON, SCRIPT, *options],
            capture_output=True,
            text=True,
            check=False,
        )
        print(done.stdout)
        assert (done.returncode, done.stderr) == (0, "")
        server.stop()
    first, second, verdict = done.stdout.splitlines()
    cached = [int(n) for line in (first, second) for n in re.findall(r"(\d+) of \d+ prompt", line)]
    assert cached[0] == 0
    assert cached[1] > CHARACTERS // 2
    assert verdict.endswith("from KVHearth; the answers are equal")
    wait_settled(daemon)
