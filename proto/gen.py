"""Generate the Python protocol code, or check that what is checked in is what the schema gives.

    python proto/gen.py            write client/kvhearth/proto/v1/*_pb2.py*
    python proto/gen.py --check    exit 1 if a file differs

The generator is pinned and old on purpose: code made by grpcio-tools 1.66 runs on protobuf 5, 6 and
7, code made by a new one only on the newest. `make proto` and `make proto-check` install it into an
environment of its own.
"""

from __future__ import annotations

import argparse
import filecmp
import importlib.metadata
import subprocess
import sys
import tempfile
from pathlib import Path

PINS = {"grpcio-tools": "1.66.2", "mypy-protobuf": "3.6.0"}
ROOT = Path(__file__).resolve().parent
TARGET = ROOT.parent / "client"
PACKAGE = Path("kvhearth/proto/v1")


def generate(out: Path) -> None:
    """Run protoc over the whole schema into ``out``."""
    sources = sorted(str(path.relative_to(ROOT)) for path in (ROOT / PACKAGE).glob("*.proto"))
    outputs = [f"--{kind}_out={out}" for kind in ("python", "mypy")]
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{ROOT}", *outputs, *sources]
    subprocess.run(command, cwd=ROOT, check=True)


def drift(out: Path) -> list[str]:
    """Names of files that differ between ``out`` and what is checked in."""
    made = {path.name for path in (out / PACKAGE).glob("*_pb2*")}
    kept = {path.name for path in (TARGET / PACKAGE).glob("*_pb2*")}
    both = sorted(made & kept)
    _, differing, broken = filecmp.cmpfiles(out / PACKAGE, TARGET / PACKAGE, both, shallow=False)
    return sorted({*differing, *broken, *(made ^ kept)})


def main() -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description="Generate the protocol code.")
    parser.add_argument("--check", action="store_true", help="only compare, exit 1 on drift")
    arguments = parser.parse_args()
    for name, pin in PINS.items():
        if (found := importlib.metadata.version(name)) != pin:
            print(f"{name} is {found}, the pinned generator is {pin}: use `make proto`")
            return 2
    if not arguments.check:
        generate(TARGET)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        names = drift(Path(folder))
    for name in names:
        print(f"drift: {name} is not what proto/ gives; run `make proto` and commit")
    return 1 if names else 0


if __name__ == "__main__":
    sys.exit(main())
