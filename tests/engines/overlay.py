"""Puts a newer vLLM's Python above the kernels of the engines' environment.

    overlay.py ENGINES ENVIRONMENT VERSION

ENVIRONMENT is a virtual environment, which then sees ENGINES behind its own packages. The
Python comes from the source distribution, the compiled parts from the build for CPUs. It tells of
changed interfaces before there is a build; what fails may still be the older kernels' doing.
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from engines.sdist import fetch  # noqa: E402
from engines.shim import describe  # noqa: E402


def packages_of(environment: str) -> Path:
    """Return the folder of an environment's packages."""
    [found] = Path(environment).resolve().glob("lib/python3*/site-packages")
    return found


def main() -> None:
    """Fetch VERSION, link the compiled parts of ENGINES into it, and name it."""
    below, above, version = packages_of(sys.argv[1]), packages_of(sys.argv[2]), sys.argv[3]
    (above / "engines.pth").write_text(f"import site; site.addsitedir({str(below)!r})\n")
    fetch(version, {"vllm": above / "vllm"})
    for kernel in (below / "vllm").rglob("*.so"):
        (above / kernel.relative_to(below)).symlink_to(kernel)
    describe(above, f"{version}+cpu")


if __name__ == "__main__":
    main()
