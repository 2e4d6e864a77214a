"""Checks the arguments of a program that a document tells to run, in place of running it."""

from __future__ import annotations

import json
import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_REQUIREMENT = re.compile(r"(\.|\./lab|kvhearth)(\[([a-z,]+)\])?")


def main(program: str, *words: str) -> None:
    """Check ``program`` with ``words``; exit with 1 and the reason if they cannot be right."""
    checks = {"pip": _pip, "vllm": _vllm, "python3": _python, "kvhearth": _verb, "cp": _copy}
    checks.get(program, _files)(*words)


def _pip(*words: str) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    known = extras["optional-dependencies"]
    for word in words[1:]:
        found = _REQUIREMENT.fullmatch(word)
        if found is None:
            sys.exit(f"pip: {word} is not this tree")
        for extra in filter(None, (found[3] or "").split(",")):
            if extra not in known:
                sys.exit(f"pip: there is no extra {extra}")


def _vllm(*words: str) -> None:
    from kvhearth.connectors.core.settings import parse_settings
    from kvhearth.connectors.vllm.adapter import VllmSettings

    transfer = json.loads(words[words.index("--kv-transfer-config") + 1])
    if transfer["kv_connector"] != "KVHearthConnector" or words[0] != "serve":
        sys.exit("vllm: another connector")
    if transfer["kv_load_failure_policy"] != "recompute":
        sys.exit("vllm: a lost block would end a request")
    parse_settings(VllmSettings, transfer.get("kv_connector_extra_config", {}), {})


def _python(*words: str) -> None:
    if words[:2] != ("-m", "venv"):
        sys.exit(f"python3: {words} is not run")
    activate = Path(words[2]) / "bin/activate"
    activate.parent.mkdir(parents=True, exist_ok=True)
    activate.touch()


def _verb(*words: str) -> None:
    """Parse the options of a verb that takes minutes."""
    import typer.main

    from kvhearth_server.cli.app import build

    command = typer.main.get_command(build())
    left = list(words)
    while hasattr(command, "commands"):
        command = command.commands[left.pop(0)]
    command.make_context(words[0], left)


def _copy(*words: str) -> None:
    source = words[0]
    if not Path(source).exists():
        sys.exit(f"cp: there is no {source}")


def _files(*words: str) -> None:
    """Check that files of this tree that are named exist."""
    for word in words:
        if word.startswith(("deploy/", "docs/", "./deploy/")) and not Path(word).exists():
            sys.exit(f"there is no {word}")


if __name__ == "__main__":
    main(*sys.argv[1:])
