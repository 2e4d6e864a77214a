"""Base of the image: ``base.py ROOT`` copies the interpreter that runs it into ROOT.

Instead of a distribution's userland ROOT gets ``/usr/local/bin/python3``, the parts of the standard
library that a daemon can use, the shared libraries that they and everything already in ROOT load,
and the files of /etc that the C library looks for: no shell, no package manager, no tools. Run it
after the packages are in ROOT, so that their libraries are found, too.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

USER_ID = 65532
PASSWD = f"""root:x:0:0:root:/:/sbin/nologin
kvhearth:x:{USER_ID}:{USER_ID}:KVHearth:/:/sbin/nologin
"""
GROUP = f"root:x:0:\nkvhearth:x:{USER_ID}:\n"
MOUNT_POINTS = ("proc", "dev", "sys")
STDLIB_LEFT_OUT = (
    *("__pycache__", "site-packages", "dist-packages", "config-*", "*.a"),
    *("test", "tests", "idlelib", "tkinter", "turtle.py", "turtledemo", "pydoc_data"),
    *("ensurepip", "venv", "lib2to3", "distutils"),
    # Extension modules that only these need, and with them libraries such as Kerberos' and Tk's.
    *("sqlite3", "curses", "dbm", "_tkinter*", "_sqlite3*", "_curses*", "_dbm*", "_gdbm*"),
    *(
        "nis.*",
        "readline*",
        "ossaudiodev*",
        "_test*",
        "_ctypes_test*",
        "_xxtestfuzz*",
        "xxlimited*",
    ),
)
SYSTEM_FOLDERS = ("/lib", "/lib64", "/usr/lib", "/usr/lib64")
LOADED_LATER = ("libgcc_s.so.1",)
"""Libraries that no file lists as needed: the C library opens them when a thread ends."""


def lay_base(root: Path) -> None:
    """Copy the base into ``root``, which holds the packages already.

    Raises:
        FileNotFoundError: a shared library that something in ``root`` needs is not on this machine.
        subprocess.CalledProcessError: the standard library does not compile, or ldconfig fails.
    """
    for name in MOUNT_POINTS:
        (root / name).mkdir(exist_ok=True)
    (root / "tmp").mkdir(exist_ok=True)
    (root / "tmp").chmod(0o1777)
    _lay_interpreter(root)
    _compile(root)
    folders = sorted({_place_library(root, path) for path in _needed([root / "usr", root / "opt"])})
    (root / "etc").mkdir(exist_ok=True)
    for name, text in (
        ("passwd", PASSWD),
        ("group", GROUP),
        ("nsswitch.conf", "hosts: files dns\n"),
        ("ld.so.conf", "".join(f"{one}\n" for one in folders)),
    ):
        (root / "etc" / name).write_text(text, encoding="ascii")
    subprocess.run([shutil.which("ldconfig") or "/sbin/ldconfig", "-r", str(root)], check=True)


def _lay_interpreter(root: Path) -> None:
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    programs = root / "usr/local/bin"
    programs.mkdir(parents=True)
    interpreter = Path(getattr(sys, "_base_executable", sys.executable)).resolve()
    shutil.copy2(interpreter, programs / version)
    (programs / "python3").symlink_to(version)
    library = root / "usr/local/lib" / version
    left_out = shutil.ignore_patterns(*STDLIB_LEFT_OUT)
    shutil.copytree(sysconfig.get_path("stdlib"), library, ignore=left_out, symlinks=False)


def _compile(root: Path) -> None:
    """Compile all Python files, because the root is read-only where it runs.

    The bytecode is unchecked and by hash, since copies of the tree may change times; it names the
    paths of the final root.
    """
    how = ["--invalidation-mode", "unchecked-hash", "-s", str(root), "-p", "/"]
    trees = [str(root / "usr/local/lib"), str(root / "opt")]
    words = [sys.executable, "-m", "compileall", "-q", "-j0", *how, *trees]
    subprocess.run(words, check=True)


def _needed(trees: Iterable[Path]) -> Iterator[Path]:
    """Return the shared libraries outside the trees that programs and libraries in them load."""
    trees = list(trees)
    loading = [
        str(path)
        for tree in trees
        for path in tree.rglob("*")
        if path.is_file() and not path.is_symlink() and (_is_library(path) or _is_program(path))
    ]
    listing = subprocess.run(
        ["ldd", *loading], check=False, capture_output=True, encoding="utf-8"
    ).stdout
    if missing := sorted(set(re.findall(r"(\S+) => not found", listing))):
        raise FileNotFoundError(f"shared libraries are missing here: {', '.join(missing)}")
    found = set(re.findall(r"(?:=> |^\s+)(/\S+) \(0x", listing, flags=re.MULTILINE))
    c_library = next(Path(one).parent for one in found if one.rpartition("/")[2] == "libc.so.6")
    found.update(str(c_library / name) for name in LOADED_LATER)
    return (
        Path(one) for one in sorted(found) if not any(Path(one).is_relative_to(t) for t in trees)
    )


def _is_library(path: Path) -> bool:
    return ".so" in path.suffixes


def _is_program(path: Path) -> bool:
    return path.parent.name == "bin" and path.read_bytes()[:4] == b"\x7fELF"


def _place_library(root: Path, path: Path) -> str:
    """Copy a library to the name under which it is looked up; return its directory in ``root``.

    The loader's own path is written into programs, so system libraries keep theirs.
    """
    system = any(path.is_relative_to(folder) for folder in SYSTEM_FOLDERS)
    folder = path.parent if system else Path("/usr/local/lib")
    place = root / folder.relative_to("/") / path.name
    place.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(path.resolve(), place)
    return str(folder)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: base.py ROOT")
    os.umask(0o022)
    lay_base(Path(sys.argv[1]).absolute())
