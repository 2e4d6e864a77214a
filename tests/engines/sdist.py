"""Parts of vLLM's source distribution, fetched with pip; none of them is in this repository."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path


def fetch(version: str, parts: Mapping[str, Path]) -> None:
    """Put folders of a version's source distribution where ``parts`` says; replaces what is there.

    pip unpacks it and then fails to build it, which is not needed; the unpacked files are kept.
    """
    beside = next(iter(parts.values())).parent
    beside.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=beside) as made:
        words = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
        words += ["--no-deps", "--no-binary", "vllm", "--no-build-isolation", "--no-clean"]
        words += ["--dest", made, f"vllm=={version}"]
        done = subprocess.run(
            words,
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "TMPDIR": made},
        )
        unpacked = [path.parents[1] for path in Path(made).glob("*/*/vllm/__init__.py")]
        if not unpacked:
            raise SystemExit(f"vllm {version} was not fetched\n{done.stderr[-3000:]}")
        for part, target in parts.items():
            shutil.rmtree(target, ignore_errors=True)
            (unpacked[0] / part).rename(target)
