"""A connector beside KVHearth's under ``MultiConnector``. It moves no KV, but demands a layout,
exchanges handshakes and refuses foreign ones, as vLLM's NIXL connector does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    SupportsHMA,
)

MET = "the sibling met its workers"


@dataclass
class SiblingHandshake(KVConnectorHandshakeMetadata):
    """From a worker."""

    word: str = "sibling"


class SiblingMetadata(KVConnectorMetadata):
    """Of a step."""


class SiblingConnector(KVConnectorBase_V1, SupportsHMA):
    """See the module."""

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str:
        """NIXL's and Mooncake's."""
        return "LBHNC"

    def get_handshake_metadata(self) -> SiblingHandshake:
        """Meant for the sibling's own scheduler."""
        return SiblingHandshake()

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        """Refuse what is not the sibling's."""
        if not metadata or not all(isinstance(one, SiblingHandshake) for one in metadata.values()):
            raise ValueError(f"the sibling expects its own handshakes, not {metadata}")
        print(MET, flush=True)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]:
        """Nothing."""
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Nothing."""

    def build_connector_meta(self, scheduler_output: Any) -> SiblingMetadata:
        """Nothing."""
        return SiblingMetadata()

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Nothing is under way."""
        return False, None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing."""

    def wait_for_save(self) -> None:
        """Nothing."""
