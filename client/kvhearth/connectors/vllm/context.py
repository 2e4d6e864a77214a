"""What the parts of the scheduler's half share."""

from __future__ import annotations

from dataclasses import dataclass

from kvhearth.client import KVClient
from kvhearth.connectors.vllm.counters import Tally
from kvhearth.connectors.vllm.groups import EngineGroups
from kvhearth.connectors.vllm.load_policy import LoadPolicy
from kvhearth.connectors.vllm.settings import Settings
from kvhearth.connectors.vllm.step_metadata import Geometry


@dataclass(frozen=True)
class Context:
    """Of one engine.

    Attributes:
        settings: the user's.
        client: the scheduler's.
        groups: of its contract.
        geometry: of its ranks.
        policy: which hits are worth a load.
        tally: where to count.
    """

    settings: Settings
    client: KVClient
    groups: EngineGroups
    geometry: Geometry
    policy: LoadPolicy
    tally: Tally
