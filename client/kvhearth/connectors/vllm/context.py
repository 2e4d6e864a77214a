"""Objects shared by the parts of the scheduler's half."""

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
    """Shared objects of one engine.

    Attributes:
        settings: the user's options.
        client: the scheduler's client.
        groups: groups of the engine's contract.
        geometry: layout of blocks over the ranks.
        policy: decides which hits are worth a load.
        tally: the counters.
    """

    settings: Settings
    client: KVClient
    groups: EngineGroups
    geometry: Geometry
    policy: LoadPolicy
    tally: Tally
