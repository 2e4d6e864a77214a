"""Compiles the native module: ``python -m kvhearth.native.build``.

Needs the standard library and a C compiler, so that a build hook can load this file by its path.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

ABI = 6
"""Raise it with every change of a C function's parameters or meaning."""

HERE = Path(__file__).resolve().parent
SOURCES = HERE / "src"
LIBRARY = HERE / "_kvhearth.so"
COMPILERS = ("cc", "gcc", "clang")
# No -march: one binary serves every machine, and functions for newer ones are chosen at run time.
FLAGS = (
    *("-O3", "-shared", "-fPIC", "-std=c11", "-Wall", "-Wextra", "-Werror=implicit"),
    *("-fvisibility=hidden", "-pthread"),
)


class BuildError(Exception):
    """The module cannot be built; the message says why."""


def sources_digest() -> str:
    """Return the digest of all C sources, or "" where only the library was installed."""
    files = sorted((*SOURCES.glob("*.c"), *SOURCES.glob("*.h")))
    digest = hashlib.sha256()
    for file in files:
        content = file.read_bytes()
        digest.update(f"{file.name} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:32] if files else ""


def compiler() -> list[str]:
    """Return the command of the C compiler: ``CC``, or the first one found.

    Raises:
        BuildError: there is none.
    """
    chosen = shlex.split(os.environ.get("CC", ""))
    for command in [chosen] if chosen else [[name] for name in COMPILERS]:
        if shutil.which(command[0]):
            return command
    raise BuildError(f"no C compiler: {shlex.join(chosen) or ', '.join(COMPILERS)} not found")


def build(target: Path = LIBRARY) -> Path:
    """Compile all sources into one shared library and return its path.

    The library appears by a rename: a process that has mapped the old one keeps it.

    Raises:
        BuildError: no compiler, or it fails; the message has its output.
    """
    if platform.system() != "Linux":
        raise BuildError(f"{platform.system()} is not supported")
    digest = sources_digest()
    if not digest:
        raise BuildError(f"no sources in {SOURCES}")
    made = target.with_name(f"{target.name}.{os.getpid()}")
    command = [
        *compiler(),
        *FLAGS,
        f"-DKVH_ABI={ABI}",
        f'-DKVH_SOURCES="{digest}"',
        *("-o", str(made)),
        *(str(source) for source in sorted(SOURCES.glob("*.c"))),
    ]
    try:
        done = subprocess.run(command, capture_output=True, encoding="utf-8", check=False)
        if done.returncode:
            raise BuildError(f"{shlex.join(command)} failed:\n{done.stderr}")
        if done.stderr:
            sys.stderr.write(done.stderr)
        made.replace(target)
    finally:
        made.unlink(missing_ok=True)
    return target


def main() -> int:
    """Build, and print the result. Exit 0 even without a compiler: KVHearth works without it."""
    try:
        sys.stdout.write(f"built {build()}\n")
    except BuildError as error:
        sys.stderr.write(f"the native module was not built, KVHearth falls back: {error}\n")
        return 1 if "--strict" in sys.argv[1:] else 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
