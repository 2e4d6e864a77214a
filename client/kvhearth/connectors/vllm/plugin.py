"""The ``vllm.general_plugins`` entry point, which makes ``KVHearthConnector`` and ``KVHearthTier``
known to vLLM by name.
"""

from __future__ import annotations

from contextlib import suppress

NAME = "KVHearthConnector"
MODULE = "kvhearth.connectors.vllm.connector"
TIER = "KVHearthTier"
TIER_MODULE = "kvhearth.connectors.vllm.tier"


def register() -> None:
    """Register the connector and the tier with vLLM's factories. vLLM calls this in each of its
    processes, in some of them more than once.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

    with suppress(ValueError):  # already registered
        KVConnectorFactory.register_connector(NAME, MODULE, NAME)
    with suppress(ValueError):
        SecondaryTierFactory.register_tier(TIER, TIER_MODULE, TIER)
