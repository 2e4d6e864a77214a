"""Identity of a SGLang server's KV: its contracts, from the arguments it runs with and its pools.

The served model name is no part of it: two models under one name find nothing of each other.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from logging import WARNING
from pathlib import Path
from typing import Any, ClassVar

from kvhearth.connectors.core.fingerprint import fingerprint
from kvhearth.connectors.core.settings import CacheSettings
from kvhearth.connectors.core.weights import (
    Weights,
    directory_digest,
    name_weights,
    unless_unknown,
)
from kvhearth.contract import DTYPE_BYTES, PRIVATE, Contract, GroupKind, GroupSpec
from kvhearth.counters import log_event
from kvhearth.transfer.memory import dtype_name

SGLANG_OWN = ("backend_name", "module_path", "class_name", "interface_v1", "allocator")
"""Entries of the configuration that SGLang reads itself."""
OF_FILES = (
    "auto",
    "bitsandbytes",
    "expert_pack",
    "fastsafetensors",
    "gguf",
    "instanttensor",
    "layered",
    "mistral",
    "npcache",
    "presharded",
    "pt",
    "safetensors",
    "sharded_state",
)
"""SGLang's load formats that take the weights from the model's own files."""
_HARMLESS = """
_radix_eviction_policy_explicitly_set abort_on_priority_when_disabled admin_api_key
allow_auto_truncate allowed_media_domains api_key asr_max_buffer_seconds asr_max_concurrent_sessions
attn_cp_size attn_dp_size base_gpu_id batch_notify_size bucket_e2e_request_latency
bucket_inter_token_latency bucket_time_to_first_token chat_template
checkpoint_engine_wait_weights_before_ready chunked_prefill_size completion_template
constrained_json_disable_any_whitespace constrained_json_max_whitespace_cnt
constrained_json_whitespace_pattern cpu_offload_gb crash_dump_folder cuda_graph_backend_decode
cuda_graph_backend_prefill cuda_graph_bs_decode cuda_graph_bs_prefill cuda_graph_config
cuda_graph_max_bs_decode cuda_graph_max_bs_prefill cuda_graph_max_seq_len_prefill
cuda_graph_prefill_max_context custom_sigquit_handler debug_cuda_graph
debug_tensor_dump_output_folder decode_log_interval decoupled_spec_bind_endpoint
decoupled_spec_connect_endpoints decoupled_spec_rank default_chat_template_kwargs
default_priority_value delete_ckpt_after_loading detokenizer_worker_num disable_cuda_graph
disable_cuda_graph_padding disable_custom_all_reduce disable_decode_cuda_graph
disable_flashinfer_autotune disable_outlines_disk_cache disable_overlap_schedule
disable_prefill_cuda_graph disable_priority_preemption disable_tokenizer_batch_decode
disaggregation_bootstrap_port disaggregation_decode_allocation_policy
disaggregation_decode_enable_offload_kvcache disaggregation_decode_enable_radix_cache
disaggregation_decode_extra_slots disaggregation_decode_host_receive_threshold
disaggregation_decode_polling_interval disaggregation_decode_retraction_backup
disaggregation_enable_kv_checksum disaggregation_ib_device disaggregation_mode
disaggregation_transfer_backend dist_init_addr dist_timeout download_dir dp_size
dynamic_batch_tokenizer_batch_size dynamic_batch_tokenizer_batch_timeout enable_cache_report
enable_cudagraph_gc enable_custom_logit_processor enable_draft_weights_cpu_backup
enable_dynamic_batch_tokenizer enable_dynamic_chunking enable_forward_pass_metrics
enable_hierarchical_cache enable_http2 enable_http_worker_reuseport enable_layerwise_nvtx_marker
enable_memory_saver enable_metrics enable_metrics_for_all_schedulers enable_mfu_metrics
enable_mixed_chunk enable_nccl_nvls enable_p2p_check enable_pd_role_switch enable_prefill_delayer
enable_priority_scheduling enable_profile_cuda_graph enable_request_time_stats_logging
enable_response_store enable_session_radix_cache enable_ssl_refresh enable_streaming_session
enable_strict_thinking enable_tokenizer_batch_encode enable_torch_compile
enable_torch_compile_debug_mode enable_trace enable_weights_cpu_backup encoder_bootstrap_port
encoder_register_urls encoder_urls engine_info_bootstrap_port ep_join_rank_offset ep_size
export_metrics_to_file export_metrics_to_file_dir extra_metric_labels fastapi_root_path
file_storage_path flashinfer_autotune_skip_ops forward_pass_metrics_ipc_name
forward_pass_metrics_worker_id gated_launch_port gc_threshold gc_warning_threshold_secs
generation_tokens_buckets gpu_id_step grammar_backend grpc_mode grpc_port grpc_response_timeout_secs
grpc_worker_threads hf_chat_template_name hicache_host_memory_fraction hicache_host_memory_mode
hicache_io_backend hicache_mem_layout hicache_ratio hicache_size hicache_storage_backend
hicache_storage_backend_extra_config hicache_storage_prefetch_policy
hicache_storage_prefetch_retry_max_attempts hicache_storage_prefetch_retry_poll_interval
hicache_write_policy host http2_initial_connection_window_size http2_max_concurrent_streams
incremental_streaming_output kv_events_config limit_mm_data_per_request load_balance_method
load_publish_endpoint load_snapshot_publish_interval log_level log_level_http log_requests
log_requests_format log_requests_level log_requests_target lora_paths max_loaded_loras
max_loras_per_batch max_mamba_cache_size max_prefill_tokens max_queued_requests max_running_requests
max_total_tokens media_url_max_file_size_mb mem_fraction_static min_free_slots_delay
mm_io_worker_num mm_preprocess_cache_size_mb mm_processor_worker_num model_path
modelopt_checkpoint_save_path modelopt_export_path moe_dense_tp_size moe_dp_size mooncake_ib_device
nccl_port nnodes node_rank num_continuous_decode_steps num_reserved_decode_tokens numa_node
optimistic_prefill_attempts otlp_service_name otlp_traces_endpoint ple_offload_dir port
pp_async_batch_depth pp_max_micro_batch_size pp_size pre_warm_nccl preferred_sampling_params
prefill_decode_interval prefill_decode_interval_min_bs prefill_delayer_forward_passes_buckets
prefill_delayer_max_delay_ms prefill_delayer_max_delay_passes prefill_delayer_queue_min_ratio
prefill_delayer_token_usage_low_watermark prefill_delayer_wait_seconds_buckets prefill_max_requests
priority_scheduling_preemption_threshold prompt_tokens_buckets radix_cache_backend
radix_eviction_policy radix_eviction_policy_config random_seed reasoning_parser
remote_instance_weight_loader_seed_instance_ip
remote_instance_weight_loader_seed_instance_service_port
remote_instance_weight_loader_send_weights_group_ports retraction_policy return_input_ids
return_output_ids revision sampling_backend sampling_defaults sampling_mask_max_tokens
schedule_conservativeness schedule_low_priority_values_first schedule_policy scheduler_recv_interval
served_model_name show_time_cost sidecar sidecar_args skip_server_warmup skip_tokenizer_init
sleep_on_idle smg_grpc_mode smg_http_sidecar_port soft_watchdog_timeout spec_trace_dir
speculative_draft_model_path speculative_draft_model_revision ssl_ca_certs ssl_certfile ssl_keyfile
ssl_keyfile_password stat_loggers stream_interval stream_response_default_include_usage
strip_thinking_cache tokenizer_backend tokenizer_metrics_allowed_custom_labels
tokenizer_metrics_custom_labels_header tokenizer_worker_num tool_call_parser tool_server
torch_compile_max_bs tp_size trace_modules trust_request_chat_template use_ray
uvicorn_access_log_exclude_prefixes warmups watchdog_timeout weight_cache_socket
weight_cache_timeout weight_loader_disable_mmap weight_loader_drop_cache_after_load
weight_loader_prefetch_checkpoints weight_loader_prefetch_num_threads weight_version
"""
HARMLESS = frozenset(_HARMLESS.split())
"""SGLang's arguments that cannot change KV, or have a part of the contract: ports, logs, schedules,
sizes, sampling, folders that are written, ranks, and the places of weights, which count by what
is there.
"""
_RANK_OWN = ("mamba",)
_HASHES = "sglang-sha256"


@dataclass(frozen=True)
class HiCacheSettings(CacheSettings):
    """Options in SGLang's ``--hicache-storage-backend-extra-config``."""

    PLACE: ClassVar[str] = "hicache-storage-backend-extra-config"


def own_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of the configuration that are not SGLang's."""
    return {name: value for name, value in given.items() if name not in SGLANG_OWN}


def server_fields(
    arguments: Mapping[str, Any], version: str, run: str, given: str = ""
) -> dict[str, str]:
    """Return the fields of ``Contract`` that all pools of a server share.

    Args:
        arguments: all of SGLang's arguments, as they are in force, and its ``environment``.
        version: SGLang's version.
        run: name of this run of the server, for weights that have no other.
        given: the user's own name for the weights, or empty.
    """
    weights = _weights(arguments, run, given)
    found = fingerprint(arguments, HARMLESS)
    weights = unless_unknown(weights, found.unknown, run, given, HiCacheSettings.PLACE)
    adapters = [_adapter(item, run) for item in arguments.get("lora_paths") or ()]
    text = json.dumps([found.digest, adapters, version])
    return {
        "model": weights.model,
        "revision": weights.revision,
        "quantization": str(arguments.get("quantization") or "none"),
        "model_dtype": str(arguments.get("dtype")),
        "rope_digest": hashlib.sha256(text.encode()).hexdigest(),
        "draft_model": _draft(arguments, run, given),
    }


def updated_fields(fields: dict[str, str], run: str, version: str, uses: int) -> dict[str, str]:
    """Return the fields after an update of the weights in place: they belong to this run alone.

    Raising the epoch of the shared namespace instead would void the blocks of other servers, whose
    weights are the old ones, and a server that starts with these would take over the new epoch.

    Args:
        version: SGLang's name of the new weights.
        uses: how often this run had weights of that name before.
    """
    mark = hashlib.sha256(f"{run}/{uses}/{version}".encode()).hexdigest()
    return {**fields, "revision": f"{PRIVATE}{mark}"}


def pool_contract(
    fields: Mapping[str, Any], config: Any, name: str, pool: Any, runs: Sequence[int]
) -> Contract:
    """Return the contract of one host pool on this rank.

    Args:
        fields: as of ``server_fields``.
        config: SGLang's ``HiCacheStorageConfig``.
        name: the pool's name, such as ``kv``.
        pool: the pool, for its dtype, layout and geometry.
        runs: bytes of the runs of memory that make a page, in the order of the block.
    """
    sizes = "+".join(f"{len(list(same))}x{size}" for size, same in itertools.groupby(runs))
    where = [
        "sglang",
        name,
        type(pool).__name__,
        str(pool.layout),
        str(pool.storage_format_tag or "plain"),
        f"layers{getattr(pool, 'start_layer', 0)}-{getattr(pool, 'end_layer', 0)}",
        _shard(config, name, pool),
        sizes,
    ]
    dtype = dtype_name(pool)
    return Contract(
        **fields,
        kv_dtype=dtype if dtype in DTYPE_BYTES else "uint8",
        groups=(GroupSpec(GroupKind.FULL, int(pool.page_size), sum(runs)),),
        layout="/".join(where),
        hash_bytes=32,
        hash_algorithm=_HASHES,
    )


def _shard(config: Any, name: str, pool: Any) -> str:
    """Name the part of a block that this rank holds; all ranks hold the same bytes of MLA."""
    parts = [
        f"pp{config.pp_rank}of{config.pp_size}",
        f"cp{config.attn_cp_rank}of{config.attn_cp_size}",
    ]
    if not config.is_mla_model or name in _RANK_OWN or hasattr(pool, "head_num"):
        parts.append(f"tp{config.tp_rank}of{config.tp_size}")
    return ",".join(parts)


def _weights(arguments: Mapping[str, Any], run: str, given: str) -> Weights:
    if arguments.get("checkpoint_engine_wait_weights_before_ready"):
        return Weights("none", f"{PRIVATE}{run}")
    foreign = "a custom weight loader" if arguments.get("custom_weight_loader") else ""
    load_format, revision = str(arguments.get("load_format")), arguments.get("revision")
    return _loaded(str(arguments.get("model_path")), revision, load_format, foreign, run, given)


def _draft(arguments: Mapping[str, Any], run: str, given: str) -> str:
    """Return the identity of a draft model whose KV is stored too; empty without one."""
    path, revision = (
        arguments.get(f"speculative_draft_model_{name}") for name in ("path", "revision")
    )
    if not path:
        return ""
    own = arguments.get("speculative_draft_load_format")
    weights = _loaded(str(path), revision, str(own or arguments.get("load_format")), "", run, given)
    return f"{arguments.get('speculative_algorithm')}:{weights.model}:{weights.revision}"


def _loaded(
    path: str, revision: Any, load_format: str, foreign: str, run: str, given: str
) -> Weights:
    if load_format == "dummy":
        return Weights("none", f"{PRIVATE}{run}")
    if load_format not in OF_FILES:
        foreign = f"the load format {load_format}"
    elsewhere = foreign and f"weights of {foreign}"
    place = HiCacheSettings.PLACE
    return name_weights(path, str(revision or ""), run, given, place, elsewhere=elsewhere)


def _adapter(item: Any, run: str) -> list[str]:
    """Name an adapter of ``--lora-paths``: SGLang's page hashes know it by name and path only."""
    folder = Path(str(item.lora_path)).expanduser()
    try:
        if folder.is_dir():
            return [str(item.lora_name), directory_digest(folder)]
        problem = "no local directory, its files have no digest"
    except OSError as error:
        problem = str(error)
    log_event(
        WARNING,
        "adapter.private",
        "an adapter has no digest: the KV of this server is kept for this run alone",
        error=f"{folder}: {problem}",
    )
    return [str(item.lora_name), run]


def keys_of(hashes: Iterable[str]) -> list[bytes]:
    """Return the keys of SGLang's page hashes, 64 hex digits each."""
    return [bytes.fromhex(text) for text in hashes]
