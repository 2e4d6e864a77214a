"""SGLang's own host pools, storage factory and controller, over our HiCache back end."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.daemon import Daemon, running_daemon, stopped_daemon, until
from support.tiers import flip_stored

pytest.importorskip("sglang", reason="needs SGLang's environment: make test-sglang")

from engines.hicache import (
    PAGES,
    Server,
    backend,
    blank,
    computed,
    config,
    extra,
    fill,
    hashes_of,
    mamba_pool,
    mha_pool,
    mla_pool,
    serving,
    wrong,
)
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheFile,
    HiCacheStorageFailureInjector,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)
from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
from sglang.srt.runtime_context import get_context

from kvhearth.connectors.sglang import server as sglang_server
from kvhearth.connectors.sglang.identity import HARMLESS
from kvhearth.errors import KVHearthError, Reason
from kvhearth.page_layout import Shape

POOLS = [
    *((mha_pool, name) for name in ("page_first", "page_first_direct", "page_head", "layer_first")),
    *((mla_pool, name) for name in ("page_first", "page_first_direct", "layer_first")),
]
MEMORY = "64MiB"


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    """A daemon that tests share."""
    with running_daemon(memory=MEMORY) as found:
        yield found


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    # SGLang compiles its hash function at first use.
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(Path(sys.prefix) / "extensions"))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The directory of a model of this test alone."""
    return weights(tmp_path / "model", str(tmp_path))


@pytest.fixture
def served(model: Path) -> Iterator[None]:
    """A server's arguments are published."""
    with serving(model):
        yield


def same(left: Any, right: Any) -> bool:
    return torch.equal(left.view(torch.uint8), right.view(torch.uint8))


def flush(server: Server) -> None:
    """Clear the host pool, as SGLang's tree does when its cache is flushed."""
    server.controller.reset()
    server.pool.clear()


def weights(folder: Path, content: str) -> Path:
    folder.mkdir()
    (folder / "weights").write_text(content)
    return folder


@pytest.mark.usefixtures("served")
@pytest.mark.parametrize(
    ("make", "layout"), POOLS, ids=lambda value: getattr(value, "__name__", value)
)
def test_pages_of_every_layout_come_back(daemon: Daemon, make: Any, layout: str) -> None:
    """In place by v1, and with the same bytes through tensors of a page's size."""
    pool, keys = make(layout), hashes_of("layout", PAGES // 2)
    with backend(pool, extra(daemon.url()), is_mla_model=make is mla_pool) as store:
        assert store._pools["kv"].kv.shape is not Shape.RAGGED
        assert store.batch_exists(keys) == 0
        assert store.batch_set_v1(keys, fill(pool, keys)) == [True] * len(keys)
        assert store.batch_exists(keys) == len(keys)
        assert store.batch_exists([*keys[:5], "0" * 64, *keys[5:]]) == 5
        taken = blank(pool, len(keys))
        assert store.batch_get_v1(keys, taken) == [True] * len(keys)
        assert wrong(pool, keys, taken) == []
        brought = store.batch_get(keys, [pool.get_dummy_flat_data_page() for _ in keys])
        assert all(map(same, brought, (computed(pool, key) for key in keys)))
        metrics = store.get_stats()
        assert (metrics.prefetch_pgs, metrics.backup_pgs) == ([len(keys)] * 2, [len(keys)])
        assert store.get_stats().prefetch_pgs == []


@pytest.mark.usefixtures("served")
def test_pages_stored_through_tensors_are_loaded_in_place(daemon: Daemon) -> None:
    pool, keys = mha_pool("layer_first"), hashes_of("tensors", 4)
    with backend(pool, extra(daemon.url())) as store:
        assert store.batch_set(keys, [computed(pool, key) for key in keys])
        assert store.set(keys[0], computed(pool, keys[0]))
        assert store.exists(keys[3])
        taken = blank(pool, 4)
        assert store.batch_get_v1(keys, taken) == [True] * 4
        assert wrong(pool, keys, taken) == []
        assert store.get("0" * 64, pool.get_dummy_flat_data_page()) is None


@pytest.mark.usefixtures("served")
def test_mistakes_of_a_caller_are_misses(daemon: Daemon) -> None:
    pool, keys = mha_pool(), hashes_of("mistakes", 4)
    with backend(pool, extra(daemon.url())) as store:
        indices = fill(pool, keys)
        assert store.batch_set_v1(keys, indices[:-1]) == [False] * 4
        assert store.batch_set_v1([keys[0]] * 4, indices) == [False] * 4
        assert store.batch_set_v1(keys, indices + pool.size) == [False] * 4
        assert store.batch_get_v1(keys, indices[:-1]) == [False] * 4
        assert store.batch_exists(["not a hash"]) == 0
        assert store.batch_exists(keys) == 0


@pytest.mark.usefixtures("served")
def test_wrong_options_and_pools_end_the_start(daemon: Daemon) -> None:
    def fails(reason: Reason, *words: str, pool: Any = None, **options: Any) -> None:
        store = backend(pool or mha_pool(), {**extra(daemon.url()), **options})
        with pytest.raises(KVHearthError) as caught, store:
            pass
        assert caught.value.reason is reason
        assert all(word in caught.value.message for word in words)

    fails(Reason.CONFIG_INVALID, "hicache-storage-backend-extra-config", "'revison'", revison="a")
    fails(Reason.BAD_URL, url="redis://x")
    unified = mha_pool()
    unified.layout = "page_unified"
    fails(Reason.BAD_CONTRACT, "'kv'", "MHATokenToKVPoolHost", "page_unified", pool=unified)


@pytest.mark.usefixtures("served")
def test_ranks_share_mla_and_nothing_else(daemon: Daemon) -> None:
    def found_by_another_rank(make: Any) -> int:
        pool, keys = make(), hashes_of("ranks", 4)
        ranks = [
            {"tp_rank": rank, "tp_size": 2, "is_mla_model": make is mla_pool} for rank in (0, 1)
        ]
        options = extra(daemon.url())
        with backend(pool, options, **ranks[0]) as one, backend(pool, options, **ranks[1]) as two:
            one.batch_set_v1(keys, fill(pool, keys))
            assert one.batch_exists(keys) == 4
            return int(two.batch_exists(keys))

    assert found_by_another_rank(mla_pool) == 4
    assert found_by_another_rank(mha_pool) == 0


@pytest.mark.usefixtures("served")
def test_verdicts_on_several_pools_are_those_of_sglangs_files(
    daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trailing states and whole pools, of which random pages are kept, and loads of them."""
    monkeypatch.setenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", str(tmp_path / "files"))
    chance = np.random.default_rng(3)
    pools = {PoolName.KV: mha_pool(), PoolName.MAMBA: mamba_pool(), PoolName.DRAFT: mha_pool()}
    policies = {
        PoolName.MAMBA: PoolHitPolicy.TRAILING_PAGES,
        PoolName.DRAFT: PoolHitPolicy.ALL_PAGES,
    }
    files = HiCacheFile(config({}))
    with backend(pools[PoolName.KV], extra(daemon.url())) as store:
        files.register_mem_pool_host(pools[PoolName.KV])
        for name, pool in pools.items():
            files.register_mem_host_pool_v2(pool, name)
            store.register_mem_host_pool_v2(pool, name)
        for turn in range(12):
            keys = hashes_of(f"pools {turn}", 8)
            for name, pool in pools.items():
                few = [key for key in keys if chance.random() < (0.6, 0.9)[name == PoolName.KV]]
                transfer = PoolTransfer(name, host_indices=fill(pool, few), keys=few)
                assert store.batch_set_v2([transfer]) == files.batch_set_v2([transfer])
                pool.clear()
            asked = [
                PoolTransfer(name, keys=keys[: 1 + turn % 2], hit_policy=policy)
                for name, policy in policies.items()
            ]
            want = files.batch_exists_v2(keys, asked)
            assert store.batch_exists_v2(keys, asked) == want
            ending = keys[: want.kv_hit_pages][-1:]
            state = pools[PoolName.MAMBA]
            taken = blank(state, len(ending))
            loads = [PoolTransfer(PoolName.MAMBA, host_indices=taken, keys=ending)]
            assert store.batch_get_v2(loads) == {PoolName.MAMBA: [True] * len(ending)}
            assert wrong(state, ending, taken) == []
            state.clear()
        unknown = [PoolTransfer(PoolName.DRAFT, hit_policy=PoolHitPolicy.BLOCK_GROUPS)]
        assert store.batch_exists_v2(keys, unknown).kv_hit_pages == 0


def test_the_controllers_threads_store_and_find_again(daemon: Daemon, model: Path) -> None:
    """Also after a restart of the server, and of the daemon with kill -9 in between."""
    with running_daemon(memory=MEMORY) as own:
        with serving(model), Server(extra(own.url())) as server:
            assert server.prefetch("a", PAGES) == (0, [])
            assert server.back_up("a", PAGES) == PAGES
            assert server.prefetch("a", PAGES) == (PAGES, [])
        own.kill()
        own.start()
        with serving(model), Server(extra(own.url())) as server:
            assert until(lambda: server.prefetch("a", PAGES)) == (PAGES, [])


def test_one_served_name_does_not_join_two_models(daemon: Daemon, tmp_path: Path) -> None:
    one, same, other = (
        weights(tmp_path / name, text) for name, text in (("a", "1"), ("b", "1"), ("c", "2"))
    )
    with serving(one), Server(extra(daemon.url())) as server:
        assert server.back_up("models", 8) == 8
    with serving(same), Server(extra(daemon.url())) as server:
        assert server.prefetch("models", 8) == (8, [])
    with serving(other), Server(extra(daemon.url())) as server:
        assert server.prefetch("models", 8) == (0, [])
    with serving(one, kv_cache_dtype="fp8_e5m2"), Server(extra(daemon.url())) as server:
        assert server.prefetch("models", 8) == (0, [])


def test_updated_weights_find_nothing_of_the_old_ones(daemon: Daemon, model: Path) -> None:
    """Pages that the old ones computed are not stored under the new ones' name."""
    with serving(model), Server(extra(daemon.url())) as server:
        assert server.back_up("old", 8) == 8
        get_context().override("test", weight_version="step-1")
        assert server.prefetch("old", 8) == (0, [])
        assert server.back_up("old", 8) == 0
        flush(server)
        until(lambda: server.back_up("new", 8) == 8, "the new namespace is attached")
        assert server.prefetch("new", 8) == (8, [])
        get_context().override("test", weight_version="step-2")
        flush(server)
        assert server.prefetch("new", 8) == (0, [])
    with serving(model), Server(extra(daemon.url())) as server:
        assert server.prefetch("old", 8) == (8, [])
        assert server.prefetch("new", 8) == (0, [])


UPDATES: dict[str, Callable[[WeightUpdater], Any]] = {
    "session": lambda updater: updater.begin_weight_update(),
    "tensors": lambda updater: updater.load_weights_from_distributed([("w", torch.ones(2))]),
    "file": lambda updater: updater.update_weights_from_disk("/none", "auto"),
}


@pytest.mark.parametrize("update", UPDATES.values(), ids=UPDATES)
def test_weights_updated_without_a_version_find_nothing_of_the_old_ones(
    daemon: Daemon, model: Path, update: Callable[[WeightUpdater], Any]
) -> None:
    """By SGLang's own updater. Its next start has the old ones again."""
    with serving(model):
        with Server(extra(daemon.url())) as server:
            assert server.back_up("old", 8) == 8
            with contextlib.suppress(Exception):
                update(updater())
            assert server.prefetch("old", 8) == (0, [])
            assert server.back_up("old", 8) == 0
            flush(server)
            until(lambda: server.back_up("new", 8) == 8, "the new namespace is attached")
        with Server(extra(daemon.url())) as server:
            assert server.prefetch("old", 8) == (0, []), "a back end that is attached later"
    sglang_server._updates = 0
    with serving(model), Server(extra(daemon.url())) as server:
        assert server.prefetch("old", 8) == (8, [])
        assert server.prefetch("new", 8) == (0, [])


def updater() -> WeightUpdater:
    """SGLang's updater of a model of one parameter."""
    model = torch.nn.Linear(1, 2, bias=False)
    model.load_weights = lambda tensors: None
    facts = {"tp_rank": 0, "device": "cpu", "gpu_id": 0, "custom_weight_loaders": {}}
    asked = dict.fromkeys(("update_model_fields", "recapture_cuda_graph", "get_model_runner"))
    settings = SimpleNamespace(model_path="/none", dtype=torch.float32)
    return WeightUpdater(model_config=settings, get_model=lambda: model, **facts, **asked)


@pytest.mark.usefixtures("served")
def test_prompts_of_different_salts_do_not_meet(daemon: Daemon) -> None:
    with Server(extra(daemon.url())) as server:
        assert server.back_up("salted", 8, "one") == 8
        assert server.prefetch("salted", 8, "one") == (8, [])
        for salt in ("other", None):
            assert server.prefetch("salted", 8, salt) == (0, [])


def test_a_sglang_whose_hashes_leave_salts_out_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(sglang_server.utils, "storage_namespace_seed")
    with pytest.raises(KVHearthError, match="cache_salt"):
        sglang_server.check_hashes()


def test_servers_of_one_model_differ_in_what_may_change_kv(daemon: Daemon, model: Path) -> None:
    """By SGLang's own arguments; the harmless ones are all its own, and change nothing."""
    with serving(model), Server(extra(daemon.url())) as server:
        assert set(sglang_server.arguments()) >= HARMLESS
        assert server.back_up("arguments", 8) == 8
    for argument in (
        {"kt_weight_path": "/experts"},
        {"modelopt_checkpoint_restore_path": "/state"},
        {"model_loader_extra_config": '{"presharded_path":"/other"}'},
        {"mm_process_config": {"image": {"max_pixels": 1000}}},
    ):
        with serving(model, **argument), Server(extra(daemon.url())) as server:
            assert server.prefetch("arguments", 8) == (0, []), argument
    with (
        serving(model, port=31000, random_seed=7, hicache_size=3, served_model_name="x"),
        Server(extra(daemon.url())) as server,
    ):
        assert server.prefetch("arguments", 8) == (8, [])


@pytest.mark.usefixtures("served")
def test_clear_spares_blocks_that_others_share(daemon: Daemon) -> None:
    pool, keys = mha_pool(), hashes_of("clear", 4)
    with backend(pool, extra(daemon.url())) as store:
        store.batch_set_v1(keys, fill(pool, keys))
        with backend(pool, extra(daemon.url())) as other:
            store.clear()
            assert other.batch_exists(keys) == store.batch_exists(keys) == 4
        until(lambda: store.clear() or store.batch_exists(keys) == 0, "the other one has left")
        assert store.batch_set_v1(keys, fill(pool, keys)) == [True] * 4
        assert store.batch_exists(keys) == 4


@pytest.mark.usefixtures("served")
def test_an_absent_daemon_is_a_miss_and_one_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "kvhearth")
    with stopped_daemon(memory=MEMORY) as own, Server(extra(own.url())) as server:
        assert server.prefetch("absent", 8) == (0, [])
        assert server.back_up("absent", 8) == 0
        lines = [each.message for each in caplog.records if each.name == "kvhearth"]
        assert len(lines) == 1, lines
        own.start()
        until(lambda: server.back_up("absent", 8) == 8, "the daemon is found")
        assert server.prefetch("absent", 8) == (8, [])


@pytest.mark.usefixtures("served")
def test_pages_that_only_the_ssd_has(tmp_path: Path) -> None:
    options = {"ssd_dirs": [f"{tmp_path}/ssd=64MiB"], "ssd_segment_bytes": "2MiB"}
    daemon = running_daemon(arena=False, memory=MEMORY, **options)
    with daemon as own, Server(extra(own.url(), promotion_wait_ms=60_000)) as server:
        assert server.back_up("ssd", PAGES) == PAGES
        until(lambda: own.counters().get("demoted_blocks", 0) >= PAGES, "they are on SSD")
        own.terminate()
        own.start()
        until(lambda: own.read_back, "the log is read back")
        assert until(lambda: server.prefetch("ssd", PAGES)[0]) == PAGES
        assert server.prefetch("ssd", PAGES) == (PAGES, [])
        assert own.counters()["promoted_blocks"] >= PAGES


@pytest.mark.usefixtures("served")
def test_a_flipped_bit_is_a_miss() -> None:
    pool, keys = mha_pool(), hashes_of("flipped", PAGES // 2)
    with running_daemon(memory=MEMORY) as own, backend(pool, extra(own.url())) as store:
        assert store.batch_set_v1(keys, fill(pool, keys)) == [True] * len(keys)
        until(lambda: own.counters()["summed_blocks"] == len(keys), "all have checksums")
        flip_stored(own.arena_dir, computed(pool, keys[3]).view(torch.uint8).numpy()[:64].tobytes())
        taken = blank(pool, len(keys))
        assert store.batch_get_v1(keys, taken) == [key != keys[3] for key in keys]
        until(lambda: store.batch_exists(keys) == 3, "the daemon drops it")


@pytest.mark.usefixtures("served")
def test_a_daemon_killed_under_traffic(daemon: Daemon) -> None:
    """Whatever was loaded has its bytes, and SGLang's threads outlive every daemon."""
    with running_daemon(memory=MEMORY) as own, Server(extra(own.url())) as server:
        over, kept, bad = threading.Event(), list[int](), list[str]()

        def traffic() -> None:
            turn = 0
            while not over.is_set():
                kept.extend([turn] * (server.back_up(f"kill {turn % 6}", 16) == 16))
                bad.extend(server.prefetch(f"kill {(turn + 3) % 6}", 16)[1])
                turn += 1

        thread = threading.Thread(target=traffic)
        thread.start()
        try:
            for _ in range(4):
                before = len(kept)
                until(lambda: len(kept) > before + 1, "stores")  # noqa: B023
                own.kill()
                own.start()
        finally:
            over.set()
            thread.join()
        assert bad == []
        until(lambda: server.back_up("after", 8) == 8, "it stores again")
        assert server.prefetch("after", 8) == (8, [])


@pytest.mark.usefixtures("served")
def test_sglangs_own_failures(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its injector fails calls at random: fewer pages come, and none of them is wrong."""
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE", "0.25")
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY", "0.001")
    with Server(extra(daemon.url())) as server:
        assert isinstance(server.storage, HiCacheStorageFailureInjector)
        stored = [server.back_up(f"injected {turn}", 8) for turn in range(40)]
        found = [server.prefetch(f"injected {turn}", 8) for turn in range(40)]
        assert set(stored) == {0, 8}
        assert {pages for pages, _ in found} == {0, 8}
        assert all(bad == [] for _, bad in found)
        assert all(kept or not pages for kept, (pages, _) in zip(stored, found, strict=True))
