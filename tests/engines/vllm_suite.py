"""vLLM's own scheduler and connector tests, run with KVHearth's connector in place of theirs.

    python tests/engines/vllm_suite.py [PYTEST ARGUMENTS]

The tests come from vLLM's source distribution of the installed version, fetched once with pip into
the engines' environment; none of them is in this repository. They need no GPU. Where they make a
scheduler without naming a connector they get KVHearth's. It is not attached, since no worker
registers pages with it: the tests show that vLLM's scheduler behaves with it as without it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from engines.harness import ENVIRONMENT, HOME, PYTHON, model  # noqa: E402
from engines.sdist import fetch  # noqa: E402

CONNECTOR = "KVHearthConnector"
UNIT = "tests/v1/kv_connector/unit"
FILES = (
    "tests/v1/core/test_scheduler.py",
    f"{UNIT}/test_cache_pollution_prevention.py",
    f"{UNIT}/test_error_propagation.py",
    f"{UNIT}/test_handshake_pp_aggregation.py",
    f"{UNIT}/test_hma_auto_config.py",
    f"{UNIT}/test_invalid_blocks_correctness.py",
    f"{UNIT}/test_kv_load_failure_recovery.py",
    f"{UNIT}/test_multi_connector.py",
    f"{UNIT}/test_output_aggregator.py",
    f"{UNIT}/test_scheduler_kv_connector_override.py",
)
REPLACED = (
    (
        "tests/v1/core/utils.py",
        "use_kv_connector: None | bool | str | MockKVConfig = None",
        f'use_kv_connector: None | bool | str | MockKVConfig = "{CONNECTOR}"',
    ),
    (
        "tests/v1/core/utils.py",
        "            kv_connector=use_kv_connector,\n            kv_role=kv_role,\n",
        "            kv_connector=use_kv_connector,\n            kv_role=kv_role,\n"
        '            kv_connector_extra_config={"url": "URL"},\n',
    ),
    (
        f"{UNIT}/utils.py",
        'kv_connector: str = "NixlConnector"',
        f'kv_connector: str = "{CONNECTOR}"',
    ),
    (f"{UNIT}/utils.py", 'kv_role: str = "kv_consumer"', 'kv_role: str = "kv_both"'),
    (
        f"{UNIT}/utils.py",
        "kv_connector_extra_config=kv_connector_extra_config or {}",
        'kv_connector_extra_config=kv_connector_extra_config or {"url": "URL"}',
    ),
    (f"{UNIT}/test_hma_auto_config.py", '"SimpleCPUOffloadConnector"', f'"{CONNECTOR}"'),
    (f"{UNIT}/test_hma_auto_config.py", '{"cpu_bytes_to_use": 1 << 30}', '{"url": "URL"}'),
)
"""Replacements: the file, the text that it must contain, and the text to put there instead."""
HUB_MODEL = "facebook/opt-125m"
LEFT_OUT = {
    # they download a multimodal model from the hub
    "ec_connector": "hub",
    "encoder": "hub",
    "multimodal": "hub",
    "mm_": "hub",
    "test_schedule_partial_requests": "hub",
    "test_multi_example_connector_consistency": "hub",
    "test_streaming_lookahead_hashes": "hub",
    # from 0.33, which has asynchronous scheduling in stages for its second model runner only
    "test_async_scheduling_pp": "a device",
    # its executor is a mock, which has no workers to ask for handshakes
    "test_kv_cache_release_after_keep_pause": "no connector",
    # they inspect the connector that they expect there
    "test_prefix_cache_stats_counted_once_for_retried": "ExampleConnector's metadata",
    "test_reset_connector_cache_no_connector": "no connector",
}
PLUGIN = '''\
"""What the left-out conftest.py of these tests does for machines without a GPU."""

import pytest
from vllm.plugins import load_general_plugins

load_general_plugins()


@pytest.fixture(autouse=True)
def _block_sizes(monkeypatch):
    from vllm.v1.attention.backend import MultipleOf
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    found = staticmethod(lambda kv_cache_spec=None: [MultipleOf(16)])
    monkeypatch.setattr(CPUAttentionBackend, "get_supported_kernel_block_sizes", found)
'''


def installed() -> str:
    """Return the version of vLLM in the engines' environment."""
    [found] = HOME.glob("lib/python3*/site-packages/vllm-*.dist-info")
    return found.stem.removeprefix("vllm-").partition("+")[0]


def fetched(version: str) -> Path:
    """Return the folder with the ``tests`` of the source distribution, fetched at first use."""
    folder = HOME / "suite" / f"vllm-{version}"
    if not (folder / "tests").is_dir():
        fetch(version, {"tests": folder / "tests"})
    return folder


def prepared(source: Path, target: Path, url: str) -> None:
    """Copy the tests with KVHearth's connector in them."""
    for part in ("tests/v1/core", "tests/v1/kv_connector"):
        shutil.copytree(source / part, target / part)
    for part in ("tests", "tests/v1"):
        shutil.copy(source / part / "__init__.py", target / part)
    for name, old, new in REPLACED:
        path = target / name
        text = path.read_text()
        if old not in text:
            raise SystemExit(f"{name} has no {old!r}: these tests have changed")
        path.write_text(text.replace(old, new))
    local = str(model("tiny"))
    for path in target.rglob("*.py"):
        path.write_text(path.read_text().replace(HUB_MODEL, local).replace('"URL"', f'"{url}"'))
    (target / "suite_plugin.py").write_text(PLUGIN)


def main() -> int:
    """Fetch, prepare, run; return pytest's exit status."""
    source = fetched(installed())
    with tempfile.TemporaryDirectory(prefix="kvh-suite-") as made:
        target = Path(made)
        prepared(source, target, f"kvhearth+unix://{made}/nobody")
        left_out = " or ".join(LEFT_OUT)
        words = [str(PYTHON), "-m", "pytest", "-q", "--noconftest", "-p", "suite_plugin"]
        words += ["-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", made]
        words += ["--timeout", "1800", "-k", f"not ({left_out})", *FILES, *sys.argv[1:]]
        environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": made}
        done = subprocess.run(words, cwd=made, env=environment, check=False)
        return done.returncode


if __name__ == "__main__":
    sys.exit(main())
