"""A second connector for ``MultiConnector``: loads asynchronously from the engine's own memory.

Imported by vLLM through ``kv_connector_module_path``. Works with one rank in the scheduler's
process and one KV cache group. It saves each full block that a step computes. The file ``control``
of ``kv_connector_extra_config`` decides about its loads: ``hold`` (nothing is written yet), ``go``,
``fail`` (half is written, the request failed) or ``blocks`` (half is written, the other blocks are
reported); ``forget`` empties the store, and nothing is saved until the next word.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engines.sibling import IdleConnector
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
)

BLOCK_TOKENS = 128
Wanted = list[tuple[bytes, int]]
STORE: dict[bytes, list[Any]] = {}
"""Store: block hash to the block's bytes, layer by layer."""


@dataclass
class Meta(KVConnectorMetadata):
    """Blocks to load, by request, and blocks to save: (hash, vLLM's block id)."""

    loads: dict[str, Wanted] = field(default_factory=dict)
    saves: Wanted = field(default_factory=list)


class Sibling(IdleConnector):
    """The connector, in both roles."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self._control = Path(extra["control"])
        self._live: dict[str, Any] = {}
        self._due: dict[str, Wanted] = {}
        self._caches: list[Any] = []
        self._loading: dict[str, Wanted] = {}
        self._bad_blocks: set[int] = set()

    @property
    def requires_kv_delivery(self) -> bool:
        """Return False: it is a cache."""
        return False

    def _word(self) -> str:
        word = self._control.read_text()
        if word == "forget":
            STORE.clear()
        return word

    # -- the scheduler's side ----------------------------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        """Remember the request, for its block hashes."""
        self._live[request.request_id] = request

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return the number of stored tokens that follow those in the engine."""
        self._word()
        first = end = num_computed_tokens // BLOCK_TOKENS
        last = (request.num_tokens - 1) // BLOCK_TOKENS
        while end < last and bytes(request.block_hashes[end]) in STORE:
            end += 1
        return (end - first) * BLOCK_TOKENS, end > first

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Schedule the load that was offered."""
        if num_external_tokens:
            [table] = blocks.get_block_ids()
            first = len(table) - num_external_tokens // BLOCK_TOKENS
            self._due[request.request_id] = [
                (bytes(request.block_hashes[at]), table[at]) for at in range(first, len(table))
            ]

    def build_connector_meta(self, scheduler_output: Any) -> Meta:
        """Return the loads that are due, and the blocks that this step fills."""
        meta, self._due = Meta(self._due), {}
        tables = scheduler_output.kv_connector_block_state
        for name, count in scheduler_output.num_scheduled_tokens.items():
            request = self._live[name]
            end = min(request.num_computed_tokens + count, request.num_tokens) // BLOCK_TOKENS
            begin = request.num_computed_tokens // BLOCK_TOKENS
            if end > begin and self._word() != "forget":
                [table] = tables.get_block_ids(name)
                hashes = request.block_hashes
                meta.saves += [(bytes(hashes[at]), table[at]) for at in range(begin, end)]
        return meta

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Forget the request; its blocks may be freed."""
        self._live.pop(request.request_id, None)
        return False, None

    # -- the worker's side -------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Keep tensors by layer, blocks first."""
        self._caches = list(kv_caches.values())

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Take this step's loads; they end when the control file says so."""
        meta = self._get_connector_metadata()
        assert isinstance(meta, Meta)
        self._loading |= meta.loads

    def wait_for_save(self) -> None:
        """Copy the blocks that this step has filled."""
        meta = self._get_connector_metadata()
        assert isinstance(meta, Meta)
        for key, block in meta.saves:
            STORE[key] = [cache[block].clone() for cache in self._caches]

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """End loads as the control file says."""
        results = KVConnectorTransferResults()
        word = self._word() if self._loading else "hold"
        if word == "hold":
            return results
        for name, wanted in self._loading.items():
            whole = word == "go" and all(key in STORE for key, _ in wanted)
            count = len(wanted) if whole else len(wanted) // 2
            for key, block in wanted[:count]:
                for cache, found in zip(self._caches, STORE.get(key, ()), strict=False):
                    cache[block].copy_(found)
            results.finished_recving.add(name)
            if word == "blocks":
                self._bad_blocks.update(block for _, block in wanted[count:])
            elif not whole:
                results.failed_recving.add(name)
        self._loading = {}
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return blocks that were not written, once."""
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad
