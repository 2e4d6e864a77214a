"""A connector beside KVHearth's under ``MultiConnector``. It moves no KV, but demands a layout,
exchanges handshakes and rejects foreign ones, as vLLM's NIXL connector does.
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
    """Handshake of a worker."""

    word: str = "sibling"


class IdleConnector(KVConnectorBase_V1, SupportsHMA):
    """Does nothing in each of the calls that vLLM demands."""

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Offer nothing."""
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Do nothing."""

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Report that nothing is under way."""
        return False, None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Do nothing."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Do nothing."""

    def wait_for_save(self) -> None:
        """Do nothing."""


class SiblingMetadata(KVConnectorMetadata):
    """Metadata of a step."""


class SiblingConnector(IdleConnector):
    """The connector; the module describes it."""

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str:
        """Return the layout of NIXL and Mooncake."""
        return "LBHNC"

    def get_handshake_metadata(self) -> SiblingHandshake:
        """Return a handshake meant for the sibling's own scheduler."""
        return SiblingHandshake()

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        """Reject handshakes of other connectors."""
        if not metadata or not all(isinstance(one, SiblingHandshake) for one in metadata.values()):
            raise ValueError(f"the sibling expects its own handshakes, not {metadata}")
        print(MET, flush=True)

    def build_connector_meta(self, scheduler_output: Any) -> SiblingMetadata:
        """Return empty metadata."""
        return SiblingMetadata()
