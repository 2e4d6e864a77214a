"""LMCache's own tests of its second level's interface, run on KVHearth's adapter.

They come from LMCache's source distribution of the installed version, fetched once with pip into
its environment; none of them is in this repository.
"""

from __future__ import annotations

import os
import re
import subprocess
import tarfile
import tempfile
from pathlib import Path

from engines.harness import LMCACHE
from engines.test_lmcache import ENVIRONMENT, PYTHON
from support.daemon import running_daemon

FOLDER = "tests/v1/distributed"
PASSED_MIN = {"test_mock_l2_adapter.py": 31, "test_native_connector_l2_adapter.py": 17}
"""Files, and the number of their tests that are of the interface."""
PARTS = (
    "EventFdInterface",
    "StoreInterface",
    "LookupAndLockInterface",
    "UnlockInterface",
    "LoadInterface",
    "EndToEndWorkflow",
    "Listener",
)
LEFT_OUT = ("delete", "usage", "bytes_by_cache_salt")
"""KVHearth bounds and evicts its blocks itself."""
PLUGIN = """
import os
import secrets

import pytest

from kvhearth.connectors.lmcache import KVHearthL2Adapter


@pytest.fixture
def adapter():
    made = KVHearthL2Adapter({"url": os.environ["KVHEARTH_URL"], "revision": secrets.token_hex(4)})
    yield made
    made.close()
"""


def fetched() -> Path:
    """Return the unpacked source distribution."""
    shown = [str(PYTHON), "-m", "pip", "show", "lmcache"]
    said = subprocess.run(shown, capture_output=True, text=True, check=True).stdout
    (version,) = re.findall(r"^Version: (\S+)$", said, re.MULTILINE)
    folder = LMCACHE / "suite" / f"lmcache-{version}"
    if not folder.is_dir():
        folder.parent.mkdir(exist_ok=True)
        words = [str(PYTHON), "-m", "pip", "--disable-pip-version-check", "download", "-q"]
        words += ["--no-deps", "--no-binary", "lmcache", "--no-build-isolation"]
        with tempfile.TemporaryDirectory(dir=folder.parent) as made:
            environment = {**os.environ, "NO_NATIVE_EXT": "1", "BUILD_WITH_CPU": "1"}
            done = subprocess.run(
                [*words, "--dest", made, f"lmcache=={version}"],
                capture_output=True,
                text=True,
                check=False,
                env=environment,
            )
            assert done.returncode == 0, done.stderr[-3000:]
            with tarfile.open(Path(made) / f"lmcache-{version}.tar.gz") as packed:
                packed.extractall(made, filter="data")
            (Path(made) / f"lmcache-{version}").rename(folder)
    return folder


def test_lmcaches_tests_of_adapters_pass(tmp_path: Path) -> None:
    (tmp_path / "ours.py").write_text(PLUGIN)
    for name in PASSED_MIN:
        text = (fetched() / FOLDER / name).read_text()
        assert "\ndef adapter():" in text, f"{name} has changed"
        (tmp_path / name).write_text(text.replace("\ndef adapter():", "\ndef theirs():"))
    words = [str(PYTHON), "-m", "pytest", "-q", "--noconftest", "-p", "ours", "-c", os.devnull]
    words += ["-p", "no:cacheprovider", "--rootdir", str(tmp_path), "--timeout", "1800"]
    words += ["-k", f"({' or '.join(PARTS)}) and not ({' or '.join(LEFT_OUT)})"]
    with running_daemon(memory="64MiB") as daemon:
        environment = {**ENVIRONMENT, "PYTHONPATH": str(tmp_path), "KVHEARTH_URL": daemon.url()}
        for name, passed_min in PASSED_MIN.items():
            done = subprocess.run(
                [*words, name],
                cwd=tmp_path,
                capture_output=True,
                text=True,
                check=False,
                env=environment,
            )
            assert done.returncode == 0, done.stdout[-6000:]
            (passed,) = re.findall(r"(\d+) passed", done.stdout)
            assert int(passed) >= passed_min, done.stdout[-2000:]
