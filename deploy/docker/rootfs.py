"""Builds the Dockerfile's stages without a container engine, into a root directory.

``rootfs.py ROOT [EXTRAS]`` reads the repository's Dockerfile: it copies the files that the
builder's COPY lines name (and nothing else), runs the builder's one RUN line, and copies into ROOT
the files that the last stage takes from it. Since that stage is FROM scratch, ROOT is the whole
image, except that its interpreter is the one that runs this file instead of the builder's. The
settings that a container engine keeps beside an image (user, environment, command) go to
``ROOT.json``.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
INSTALLER = "./deploy/docker/install.sh"


@dataclass(frozen=True)
class Instruction:
    """One instruction: its name, such as ``COPY``, and the text after it, options included."""

    name: str
    text: str

    @property
    def words(self) -> list[str]:
        """Words after the options."""
        return [word for word in shlex.split(self.text) if not word.startswith("--")]

    @property
    def options(self) -> dict[str, str]:
        """Options of COPY: ``from`` and ``chown``."""
        found = re.findall(r"--(\w+)=(\S+)", self.text)
        return {str(name): str(value) for name, value in found}


@dataclass
class Stage:
    """One stage: its base, its alias, and the instructions after its FROM line."""

    base: str
    name: str
    instructions: list[Instruction] = field(default_factory=list)

    def each(self, name: str) -> list[Instruction]:
        """Return the stage's instructions of one name."""
        return [one for one in self.instructions if one.name == name]

    def words(self, name: str) -> list[str]:
        """Return the words of the last instruction of that name, in either form; empty if none.

        ``HEALTHCHECK`` gives its command.
        """
        found = self.each(name)
        if not found:
            return []
        bracket = found[-1].text.find("[")
        text = found[-1].text
        return list(json.loads(text[bracket:])) if bracket >= 0 else shlex.split(text)


def stages_of(dockerfile: str) -> list[Stage]:
    """Return the stages of a Dockerfile; comments are dropped and continued lines joined."""
    lines = [line for line in dockerfile.splitlines() if not line.lstrip().startswith("#")]
    stages: list[Stage] = []
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        name, _, text = line.strip().partition(" ")
        if name == "FROM":
            base, _, alias = text.partition(" AS ")
            stages.append(Stage(base.strip(), alias.strip()))
        elif name and stages:
            stages[-1].instructions.append(Instruction(name, text.strip()))
    return stages


def build(root: Path, repository: Path = REPOSITORY, extras: str = "") -> None:
    """Make ``root`` and ``root``.json from the Dockerfile of ``repository``.

    Args:
        extras: value of the builder's argument EXTRAS; by default the Dockerfile's own.

    Raises:
        ValueError: the Dockerfile has an instruction that this file does not support.
        subprocess.CalledProcessError: the wheel cannot be built or installed.
    """
    builder, final = stages_of((repository / "Dockerfile").read_text(encoding="utf-8"))
    if final.each("RUN"):
        raise ValueError("the last stage has a RUN line; put it into deploy/docker/install.sh")
    if final.base != "scratch":
        raise ValueError(f"the last stage is FROM {final.base}, and what that holds is not here")
    root.mkdir(parents=True)
    with tempfile.TemporaryDirectory(prefix="kvhearth-image-") as folder:
        source, image = Path(folder, "src"), Path(folder, "image")
        arguments = dict(one.text.split("=", 1) for one in builder.each("ARG"))
        if set(arguments) != {"EXTRAS"}:
            raise ValueError(f"the builder has other arguments than EXTRAS: {arguments}")
        extras = extras or arguments["EXTRAS"]
        _run_builder(builder, repository, source, image, {"EXTRAS": extras})
        for copy in final.each("COPY"):
            taken, target = copy.words
            if copy.options.get("from") != builder.name or not taken.startswith("/image/"):
                raise ValueError(f"the last stage copies from elsewhere: {copy.text}")
            place = root / target.lstrip("/")
            source_place = image / taken.removeprefix("/image/")
            shutil.copytree(source_place, place, symlinks=True, dirs_exist_ok=True)
            _give(place, copy.options.get("chown", ""))
    root.with_suffix(".json").write_text(json.dumps(_config(final), indent=2), encoding="utf-8")


def _run_builder(
    builder: Stage, repository: Path, source: Path, image: Path, arguments: dict[str, str]
) -> None:
    for copy in builder.each("COPY"):
        *taken, target = copy.words
        for name in taken:
            many = len(taken) > 1 or target.endswith("/")
            place = source / target / Path(name).name if many else source / target
            place.parent.mkdir(parents=True, exist_ok=True)
            if (repository / name).is_dir():
                ignored = shutil.ignore_patterns("__pycache__", "*.pyc")
                shutil.copytree(repository / name, place, ignore=ignored)
            else:
                shutil.copy2(repository / name, place)
    commands = [run.words for run in builder.each("RUN")]
    if commands != [[INSTALLER, "/src", "/image"]]:
        raise ValueError(f"the builder may run only {INSTALLER} /src /image, not {commands}")
    words = [INSTALLER, str(source), str(image), sys.executable]
    subprocess.run(words, cwd=source, check=True, env=_pip_environment() | arguments)


def _pip_environment() -> dict[str, str]:
    """Return the environment without the Python variables of a virtual environment or a test run.

    The settings of pip stay.
    """
    return {n: v for n, v in os.environ.items() if not n.startswith(("PYTHON", "VIRTUAL_ENV"))}


def _give(place: Path, owner: str) -> None:
    """Change the owner to the one that COPY names, if this process is root."""
    if owner and os.geteuid() == 0:
        uid, _, gid = owner.partition(":")
        os.chown(place, int(uid), int(gid))


def _config(final: Stage) -> dict[str, object]:
    environment = dict(
        word.split("=", 1) for one in final.each("ENV") for word in shlex.split(one.text)
    )
    return {
        "user": final.words("USER")[0],
        "environment": environment,
        "entrypoint": final.words("ENTRYPOINT"),
        "command": final.words("CMD"),
        "healthcheck": final.words("HEALTHCHECK"),
    }


def size_bytes(root: Path) -> int:
    """Return the bytes that the files of ``root`` occupy; links are not followed."""
    return sum(path.lstat().st_size for path in root.rglob("*") if not path.is_dir())


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit("usage: rootfs.py ROOT [EXTRAS]")
    build(Path(sys.argv[1]).absolute(), extras="".join(sys.argv[2:]))
    sys.stdout.write(f"{sys.argv[1]}: {size_bytes(Path(sys.argv[1])) / 1e6:.0f} MB\n")
