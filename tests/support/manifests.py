"""Engines as started by ``deploy/`` and described in docs/engines.md: arguments, environment."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
SIDECAR = DEPLOY / "kubernetes/sidecar.yaml"
COMPOSE = DEPLOY / "compose.yaml"
RECIPES = DEPLOY.parent / "docs/engines.md"


@dataclass(frozen=True)
class Deployed:
    """One container of an engine.

    Attributes:
        image: its image.
        words: arguments of ``vllm serve``.
        environment: its variables.
        mounts: paths inside it, by the volume's name.
        daemon_mounts: the same for the daemon's container beside it.
        daemon_environment: variables of that container.
    """

    image: str
    words: list[str]
    environment: dict[str, str]
    mounts: dict[str, str]
    daemon_mounts: dict[str, str]
    daemon_environment: dict[str, str]

    @property
    def transfer(self) -> dict[str, Any]:
        """Return its ``--kv-transfer-config``."""
        found: dict[str, Any] = json.loads(self.words[self.words.index("--kv-transfer-config") + 1])
        return found


def default(text: object) -> str:
    """Replace ``${NAME:-default}`` by the default, as compose does where nothing is set."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", str(text))


def kubernetes_engine() -> Deployed:
    """Return the pod's engine."""
    spec = yaml.safe_load(SIDECAR.read_text())["spec"]
    (daemon,), (engine,) = spec["initContainers"], spec["containers"]
    mounts = [
        {one["name"]: one["mountPath"] for one in each["volumeMounts"]} for each in (engine, daemon)
    ]
    environment, served = (
        {one["name"]: one["value"] for one in each["env"]} for each in (engine, daemon)
    )
    return Deployed(engine["image"], engine["args"], environment, *mounts, served)


def compose_engine() -> Deployed:
    """Return the service of the profile ``engine``."""
    services = yaml.safe_load(COMPOSE.read_text())["services"]
    engine, daemon = services["engine"], services["kvhearth"]
    mounts = [
        dict(default(one).split(":")[:2] for one in each["volumes"]) for each in (engine, daemon)
    ]
    words = [default(word) for word in engine["command"]]
    served = {name: default(value) for name, value in daemon["environment"].items()}
    return Deployed(engine["image"], words, engine["environment"], *mounts, served)


ENGINES = {"kubernetes": kubernetes_engine, "compose": compose_engine}


def recipes() -> list[dict[str, Any]]:
    """Return each ``--kv-transfer-config`` that docs/engines.md shows as JSON, in its order."""
    blocks = re.findall(
        r"^```json\n(.*?)^```$", RECIPES.read_text(), flags=re.MULTILINE | re.DOTALL
    )
    return [found for found in map(json.loads, blocks) if "kv_connector" in found]
