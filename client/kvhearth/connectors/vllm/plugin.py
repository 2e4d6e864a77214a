"""The ``vllm.general_plugins`` entry point, which makes ``KVHearthConnector`` known to vLLM by
name.
"""

from __future__ import annotations

NAME = "KVHearthConnector"
MODULE = "kvhearth.connectors.vllm.connector"


def register() -> None:
    """Register the connector with vLLM's factory. vLLM calls this in each of its processes, in some
    of them more than once.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    try:
        KVConnectorFactory.register_connector(NAME, MODULE, NAME)
    except ValueError:
        return  # already registered
