"""``kvhearth bench scheduler`` runs vLLM's own scheduler with each connector; the machine's speed
is not asserted.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from engines.harness import PYTHON

from kvhearth.errors import KVHearthError
from kvhearth_lab.bench.report import missed
from kvhearth_lab.bench.scheduler.figures import FIGURES, QUICK, SIDES
from kvhearth_lab.bench.scheduler.run import run

pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(not PYTHON.exists(), reason="needs the engines' environment"),
]


def test_a_quick_run_has_every_figure() -> None:
    command = [sys.executable, "-m", "kvhearth_server.cli.app", "bench", "scheduler", "--quick"]
    ended = subprocess.run(
        [*command, "--json", "--engine-python", str(PYTHON)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    line = json.loads(ended.stdout.splitlines()[-1])
    assert [each.name for each in FIGURES if type(line[each.name]) not in (int, float)] == []
    assert line["missed"] == missed(line, FIGURES)
    assert line["books"] == {"balanced": True, "errors": []}
    blocks = {prompt: prompt // 16 * QUICK.running for prompt in QUICK.prompts}
    for prompt, sides in line["sides"].items():
        assert tuple(sides) == SIDES
        ours, none = sides["kvhearth"], sides["none"]
        # The prompts' blocks, and those that decode filled.
        assert ours["stored_blocks"] > blocks[int(prompt)]
        assert ours["full_hits"]["loads"] == sides["offloading"]["full_hits"]["loads"] == 16
        assert ours["decode"]["connector_us"] > 0
        assert none["decode"]["connector_us"] == none["full_hits"]["loads"] == 0
    assert "decode_step_share" in ended.stderr


def test_a_rig_that_does_not_start_is_an_error(tmp_path: Path) -> None:
    """Figures of one side alone would mean nothing."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho no vllm here >&2\nexit 3\n")
    python.chmod(0o755)
    with pytest.raises(KVHearthError, match="no vllm here"):
        run(python, QUICK, lambda _: None)
