"""Translation of vLLM's configuration, requests, KV cache and steps, without vLLM."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvhearth.connectors.core.engine import RequestOptions, Step
from kvhearth.connectors.core.settings import parse_settings
from kvhearth.connectors.core.step_metadata import Handshake
from kvhearth.connectors.vllm.adapter import (
    RequestReader,
    VllmPages,
    VllmSettings,
    _page_runs,
    check_codec,
    make_scheduler,
    make_worker,
    step_of,
)
from kvhearth.connectors.vllm.hints import HANDOVER, PREFETCH, RETAIN
from kvhearth.contract import Contract, GroupKind, GroupSpec
from kvhearth.copiers import kernels
from kvhearth.errors import KVHearthError
from kvhearth.page_layout import PagedKV, Shape
from kvhearth_lab.harness import HUNG_S

NOWHERE = VllmSettings("kvhearth+unix:///nowhere/kvhearth")
CONTRACT = Contract("m", "r", "uint8", (GroupSpec(GroupKind.FULL, 16, 1024),))
OFFER = Handshake(CONTRACT.to_json(), 1, (0,))


def test_a_codec_is_refused_for_pages_that_cannot_be_encoded_here() -> None:
    plain = Contract("m", "r", "bfloat16", (GroupSpec(GroupKind.FULL, 16, 1024),))
    on_gpu: Any = SimpleNamespace(device="cuda:1")
    check_codec(plain, [on_gpu])
    check_codec(plain.with_codec("int4"), [PagedKV([np.zeros((1, 512), np.uint16)])])
    if kernels.available() is None:
        check_codec(plain.with_codec("fp8"), [on_gpu])
        return
    with pytest.raises(KVHearthError, match="codec fp8 for pages on cuda:1: no "):
        check_codec(plain.with_codec("fp8"), [on_gpu])


class Pool:
    """vLLM's block pool, as far as the adapter uses it."""

    def __init__(self, count: int) -> None:
        self.blocks = [SimpleNamespace(block_id=at, ref_cnt=0) for at in range(count)]
        self.freed: list[int] = []

    def touch(self, blocks: list[Any]) -> None:
        for block in blocks:
            block.ref_cnt += 1

    def free_blocks(self, blocks: Any) -> None:
        for block in blocks:
            block.ref_cnt -= 1
            self.freed.append(block.block_id)


def config(role: str = "kv_both", **over: Any) -> Any:
    """The part of vLLM's configuration that the scheduler's half needs."""
    transfer = SimpleNamespace(
        kv_role=role,
        is_kv_producer=role in ("kv_producer", "kv_both"),
        is_kv_consumer=role in ("kv_consumer", "kv_both"),
        engine_id="e",
    )
    scheduler = {"max_num_batched_tokens": 512, "enable_chunked_prefill": True}
    values = {
        "kv_transfer_config": transfer,
        "speculative_config": None,
        "scheduler_config": SimpleNamespace(**scheduler),
        "model_config": SimpleNamespace(model="org/model", is_prefix_caching_supported=True),
        "weight_transfer_config": None,
        "parallel_config": SimpleNamespace(nnodes=1),
        "instance_id": "run1",
        "kv_events_config": None,
    }
    return SimpleNamespace(**{**values, **over})


def request(**over: Any) -> Any:
    values = {
        "kv_transfer_params": None,
        "lora_request": None,
        "skip_reading_prefix_cache": False,
        "all_token_ids": [1, 2],
        "mm_features": [],
        "cache_salt": None,
        "prompt_embeds": None,
        "session_id": None,
        "kv_hints": None,
    }
    return SimpleNamespace(**{**values, **over})


def test_options() -> None:
    assert parse_settings(VllmSettings, {"layout": "none"}).layout == "none"
    with pytest.raises(KVHearthError, match=r"kv_connector_extra_config: layout='LBHNC'.*BLHNC"):
        parse_settings(VllmSettings, {"layout": "LBHNC"})


def test_a_bound_of_zero_means_none_and_nonsense_is_refused_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    reader = RequestReader()
    zero = request(kv_transfer_params={"max_load_tokens": 0, "max_offload_tokens": 0})
    nothing = RequestOptions(load_tokens_max=0, store_tokens_max=0)
    assert reader.options_of(zero) == nothing != RequestOptions()
    for wrong in (-1, 0.5, 64.0, True, False, "0", 1 << 31, 10**5000, [0]):
        asked = request(kv_transfer_params={"max_offload_tokens": wrong, "max_load_tokens": None})
        assert reader.options_of(asked) == RequestOptions()
    (line,) = caplog.messages
    assert "request.bad_tokens" in line
    assert "parameter=max_offload_tokens type=int" in line


def test_tokens_are_told_if_hashes_cover_nothing_else() -> None:
    reader = RequestReader(publishes=True)
    assert reader.options_of(request()).token_ids == [1, 2]
    for more in ({"mm_features": [1]}, {"cache_salt": "s"}, {"prompt_embeds": b""}):
        assert reader.options_of(request(**more)).token_ids is None


def test_hints_of_agents() -> None:
    reader = RequestReader()
    asked = request(kv_transfer_params={RETAIN: 600, PREFETCH: True}, session_id="s")
    hinted = RequestOptions(retain_s=600.0, prefetch=True, session_id="s")
    assert reader.options_of(asked) == hinted
    actions = [
        SimpleNamespace(action_type="pin", payload={"ttl_s": 2.5}),
        SimpleNamespace(action_type="prefetch", payload={}),
        SimpleNamespace(action_type="demote", payload={}),
        SimpleNamespace(action_type="retain", payload={}),
    ]
    found = reader.options_of(request(kv_hints=SimpleNamespace(actions=actions)))
    assert found == RequestOptions(retain_s=2.5, prefetch=True, bad_hints=2)


@pytest.mark.parametrize("wrong", [-1, 0, math.nan, math.inf, 1e300, True, "600", None, [1]])
def test_a_hint_that_is_none_is_ignored_and_counted(wrong: Any) -> None:
    reader = RequestReader()
    asked = request(kv_transfer_params={RETAIN: wrong, PREFETCH: "yes"})
    assert reader.options_of(asked) == RequestOptions(bad_hints=2)


def test_a_misspelt_hint_is_told(caplog: pytest.LogCaptureFixture) -> None:
    reader = RequestReader()
    wrong = {"kvhearth_retain": 600, "KVHearth_prefetch": True, PREFETCH: True, "do_remote": 1}
    found = reader.options_of(request(kv_transfer_params=wrong))
    assert found == RequestOptions(prefetch=True, bad_hints=2)
    (line,) = caplog.messages
    assert "request.bad_hint" in line
    assert "hint=kvhearth_retain" in line
    assert "did you mean kvhearth_retain_s?" in line


def test_demands_of_requests(tmp_path: Path) -> None:
    reader = RequestReader()
    assert reader.options_of(request()) == RequestOptions()
    assert reader.options_of(request(skip_reading_prefix_cache=True)).skips
    params = {HANDOVER: 160, "max_load_tokens": 33, "max_offload_tokens": 64}
    assert reader.options_of(request(kv_transfer_params=params)) == RequestOptions(
        handover_tokens=160, load_tokens_max=33, store_tokens_max=64
    )
    wrong = {HANDOVER: "160", "max_load_tokens": -1, "max_offload_tokens": 1 << 31}
    assert reader.options_of(request(kv_transfer_params=wrong)) == RequestOptions()
    (tmp_path / "adapter.bin").write_bytes(b"first")
    lora = SimpleNamespace(lora_path=str(tmp_path), lora_int_id=1, load_inplace=False)
    find = reader.options_of(request(lora_request=lora)).find_key_salt
    assert find is not None
    assert find()


def test_references_to_blocks() -> None:
    pool = Pool(4)
    pages = VllmPages(pool)
    assert pages.page_count == 4
    pages.hold([1, 3])
    pages.hold([3])
    assert [pages.has_one_reference(page) for page in (1, 2, 3)] == [True, False, False]
    pages.release([3, 1])
    assert pool.freed == [3, 1]


def test_steps() -> None:
    tables = SimpleNamespace(boundary_state_offloads={"a": []})
    blocks = SimpleNamespace(blocks=([SimpleNamespace(block_id=1), SimpleNamespace(block_id=2)],))
    manager = SimpleNamespace(get_blocks={"a": blocks}.__getitem__)
    output = SimpleNamespace(
        total_num_scheduled_tokens=7, num_scheduled_tokens={"a": 7}, kv_connector_block_state=tables
    )
    step = step_of(output, manager)
    assert (step.tokens, step.scheduled, step.states) == (7, {"a": 7}, {"a": []})
    (table,) = step.find_table("a")
    assert (list(table), len(table), table[1], list(table[1:])) == ([1, 2], 2, 2, [2])
    output.kv_connector_block_state = None
    step = step_of(output, manager)
    assert (step.tokens, step.scheduled) == (7, Step().scheduled)


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer", "kv_both"])
def test_an_engine_of_each_role(role: str) -> None:
    half = make_scheduler(NOWHERE, config(role), 16, [OFFER], Pool(4))
    assert half is not None
    assert half._facts.stores == (role != "kv_consumer")
    assert half._facts.loads == (role != "kv_producer")
    half.shutdown()


@pytest.mark.parametrize("lacks", ["chunks", "prefixes"])
def test_an_engine_that_cannot_go_on_from_cached_kv_is_not_served(
    lacks: str, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM asks connectors even if its backend ignores the blocks that they load."""
    given = config()
    given.scheduler_config.enable_chunked_prefill = lacks != "chunks"
    given.model_config.is_prefix_caching_supported = lacks != "prefixes"
    assert make_scheduler(NOWHERE, given, 16, [OFFER], Pool(4)) is None
    assert "without KVHearth" in caplog.text


def test_a_worker_without_pages_says_so() -> None:
    worker = make_worker(NOWHERE, config(), None, {}, 0)
    assert "no KV cache" in worker.handshake().problem
    worker.shutdown()


@pytest.mark.realtime("imports of a new interpreter")
def test_the_package_imports_without_vllm_torch_or_a_daemon() -> None:
    words = (
        "import sys; sys.modules['vllm'] = sys.modules['torch'] = None;"
        "import kvhearth.connectors.vllm as c, kvhearth.connectors.vllm.plugin,"
        "kvhearth.connectors.vllm.adapter;"
        "assert 'KVHearthConnector' in c.__all__"
    )
    done = subprocess.run(
        [sys.executable, "-c", words],
        capture_output=True,
        text=True,
        timeout=HUNG_S,
        check=False,
        cwd=Path(__file__).parent,
    )
    assert done.returncode == 0, done.stderr


torch = pytest.importorskip("torch")

LAYERS, BLOCKS, HEADS, TOKENS, CONTENT = 3, 5, 2, 4, 8
PAGE = HEADS * TOKENS * CONTENT
NAMES = [f"layer.{number}" for number in range(LAYERS)]
DIMENSIONS = {"L": LAYERS, "B": BLOCKS, "H": HEADS, "N": TOKENS, "C": CONTENT}


def cache(layout: str, padding: int = 0) -> tuple[Any, dict[str, Any]]:
    """vLLM's plan and its per-layer views [B, H, N, C] of one allocation."""
    shape = [DIMENSIONS[name] for name in layout]
    strides = [int(np.prod(shape[at + 1 :])) for at in range(5)]
    if padding:
        assert layout.startswith("BL")
        strides[0] += padding
    stride = dict(zip(layout, strides, strict=True))
    size = stride["B"] * BLOCKS if layout[0] == "B" else LAYERS * BLOCKS * PAGE
    data = torch.arange(size, dtype=torch.int32).remainder(251).to(torch.uint8)
    views = {
        name: data.as_strided(
            (BLOCKS, HEADS, TOKENS, CONTENT),
            (stride["B"], stride["H"], stride["N"], stride["C"]),
            number * stride["L"],
        )
        for number, name in enumerate(NAMES)
    }
    spec = SimpleNamespace(page_size_bytes=PAGE)
    plan = SimpleNamespace(
        layers=NAMES,
        offset=0,
        layer_stride=stride["L"],
        block_stride=stride["B"],
        host_resident=False,
    )
    config = SimpleNamespace(
        kv_cache_layout=layout,
        kv_cache_tensors=[plan],
        kv_cache_groups=[SimpleNamespace(layer_names=NAMES, kv_cache_spec=spec)],
        num_blocks=BLOCKS,
    )
    return config, views


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"])
def test_a_block_is_all_of_its_bytes(layout: str) -> None:
    config, views = cache(layout)
    runs = _page_runs(config, views)
    kv = PagedKV([run for name in NAMES for run in runs[name]])
    assert (kv.page_count, kv.page_bytes) == (BLOCKS, LAYERS * PAGE)
    for block in range(BLOCKS):
        found = np.concatenate([part[block] for part in kv.host_parts()])
        expected = np.concatenate([views[name][block].numpy().ravel() for name in NAMES])
        assert sorted(found.tolist()) == sorted(expected.tolist())


def test_blocks_outermost_are_one_copy_each() -> None:
    config, views = cache("BLHNC")
    runs = _page_runs(config, views)
    assert PagedKV([run for name in NAMES for run in runs[name]]).shape is Shape.SINGLE


def test_padding_between_blocks_is_left_out() -> None:
    config, views = cache("BLHNC", padding=64)
    runs = _page_runs(config, views)
    kv = PagedKV([run for name in NAMES for run in runs[name]])
    assert kv.page_bytes == LAYERS * PAGE
    assert np.array_equal(kv.host_parts()[0][3][:PAGE], views[NAMES[0]][3].numpy().ravel())


def test_a_plan_that_does_not_fit_the_tensors_is_refused() -> None:
    config, views = cache("LBHNC")
    config.kv_cache_tensors[0].layer_stride += 8
    with pytest.raises(KVHearthError, match="plan says"):
        _page_runs(config, views)
