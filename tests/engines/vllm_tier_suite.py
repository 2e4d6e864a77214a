"""vLLM's own tests of its tiers, run with KVHearth's tier in place of theirs, on a real daemon.

    python tests/engines/vllm_tier_suite.py [PYTEST ARGUMENTS]

The tests come from vLLM's source distribution of the installed version, as those of
``vllm_suite.py``. They need no GPU.
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

from engines.harness import ENVIRONMENT, HOME, PYTHON  # noqa: E402
from engines.vllm_suite import fetched  # noqa: E402
from support.daemon import running_daemon  # noqa: E402

UNIT = "tests/v1/kv_offload"
FILES = (f"{UNIT}/tiering/test_fs_tier.py", f"{UNIT}/tiering/test_tiering_offloading.py")
REPLACED = (
    (
        FILES[0],
        "from vllm.v1.kv_offload.tiering.fs.manager import (\n    FileSystemTierManager,\n)",
        "from tier_standins import FileSystemTierManager",
    ),
    (
        FILES[0],
        "    for k in (key(1), key(2)):\n"
        "        assert os.path.exists(tier.file_mapper.get_file_name(k))\n",
        "",
    ),
    (
        FILES[0],
        "    assert all(os.path.exists(tier.file_mapper.get_file_name(k)) for k in keys)\n",
        "",
    ),
    (FILES[0], "writer.file_mapper.get_file_name(key(7))", "writer._contract"),
    (FILES[0], "reader.file_mapper.get_file_name(key(7))", "reader._contract"),
    (FILES[0], "er.file_mapper.base_path", "er._contract"),
    (
        FILES[1],
        "from vllm.v1.kv_offload.tiering.example.manager import ExampleSecondaryTierManager",
        "from tier_standins import ExampleSecondaryTierManager",
    ),
)
"""Replacements: the file, the text that it must contain, and the text to put there instead."""
LEFT_OUT = {
    # they look at files or at the file tier's threads
    "test_store_creates_file_and_lookup_succeeds": "files",
    "test_store_accepts_block_published_by_another_writer": "files",
    "test_invalid_path_raises_at_construction": "files",
    "test_invalid_locality": "an option of the file tier",
    "test_factory_forwards_locality": "an option of the file tier",
    "test_shutdown_discards_pending_tasks": "threads",
    "test_store_load_roundtrip_without_o_direct": "files",
    "test_wait_idle_blocks_until_tasks_complete": "threads",
    "test_batch_lookup_c_extension": "files",
    "test_failed_load_corrects_verdict": "files",
    "test_failed_load_after_abort": "files",
    "test_batched_": "files",
    "test_transient_load_failure_leaves_file": "files",
    "emit": "events are an option of the file tier",
    "test_store_event": "events are an option of the file tier",
    "test_events_": "events are an option of the file tier",
    # they look into the tier that they expect there
    "test_basic_store_and_lookup": "a request keeps its answers, those of the example do not",
    "test_config_info_keys": "the example's labels",
    "test_failed_promotion_keeps": "ends the example's jobs in its place",
}


def installed() -> str:
    """Return the version of vLLM in the engines' environment."""
    [found] = HOME.glob("lib/python3*/site-packages/vllm-*.dist-info")
    return found.stem.removeprefix("vllm-").partition("+")[0]


def prepared(source: Path, target: Path) -> None:
    """Copy the tests with KVHearth's tier in them."""
    shutil.copytree(source / UNIT, target / UNIT)
    for part in ("tests", "tests/v1"):
        shutil.copy(source / part / "__init__.py", target / part)
    shutil.copy(HERE / "tier_standins.py", target)
    for name, old, new in REPLACED:
        path = target / name
        text = path.read_text()
        if old not in text:
            raise SystemExit(f"{name} has no {old!r}: these tests have changed")
        path.write_text(text.replace(old, new))


def main() -> int:
    """Fetch, prepare, run; return pytest's exit status."""
    source = fetched(installed())
    with (
        tempfile.TemporaryDirectory(prefix="kvh-suite-") as made,
        running_daemon(memory="256MiB") as daemon,
    ):
        prepared(source, Path(made))
        words = [str(PYTHON), "-m", "pytest", "-q", "--noconftest", "-p", "no:cacheprovider"]
        words += ["-c", os.devnull, "--rootdir", made, "--timeout", "1800"]
        words += ["-k", f"not ({' or '.join(LEFT_OUT)})", *FILES, *sys.argv[1:]]
        environment = {
            **os.environ,
            **ENVIRONMENT,
            "PYTHONPATH": made,
            "KVHEARTH_URL": f"kvhearth+unix://{daemon.socket_dir}",
        }
        done = subprocess.run(words, cwd=made, env=environment, check=False)
        return done.returncode


if __name__ == "__main__":
    sys.exit(main())
