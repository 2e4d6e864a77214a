"""Encoded blocks on a real daemon: values within the bounds, fewer bytes, a loss only on demand."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.codec_bounds import bounds
from support.daemon import Daemon, running_daemon, until
from support.http_door import ask
from support.raw_door import new_keys

import kvhearth
from kvhearth.contract import namespace_digest
from kvhearth.copiers import CopyKind
from kvhearth.transfer.copier_pool import CopierPool
from kvhearth_lab.harness import HUNG_S

BLOCKS = 20
SHAPE = (BLOCKS, 2, 16, 4, 128)
"""KV of 16 tokens, 4 heads of 128: 32 KiB a block in half precision."""
SHARES = {"fp8": 1 / 2 + 1 / 64, "int4": 1 / 4 + 1 / 32}


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with running_daemon() as daemon:
        yield daemon
        daemon.wait_quiet()


def words(dtype: str, seed: int = 0) -> Any:
    """Return pages as a torch tensor, with outliers as keys have them."""
    torch = pytest.importorskip("torch")
    values = np.random.default_rng(seed).standard_normal(SHAPE)
    values[..., 7] *= 40
    return torch.from_numpy(values).to(getattr(torch, dtype))


def checked(codec: str, dtype: str, pages: Any, back: Any) -> None:
    import torch

    bits = torch.int32 if dtype == "float32" else torch.int16
    sides = [each.reshape(-1).view(bits).numpy() for each in (pages, back)]
    unsigned = [each.view(f"u{each.itemsize}") for each in sides]
    bounds(codec, dtype, *unsigned)


@pytest.mark.parametrize(("codec", "dtype"), [("fp8", "bfloat16"), ("int4", "float32")])
def test_values_come_back_within_the_bounds_and_take_fewer_bytes(
    daemon: Daemon, codec: str, dtype: str
) -> None:
    import torch

    pages = words(dtype)
    contract = kvhearth.contract_for(pages, model="m", revision="r", codec=codec)
    share = SHARES[codec] * (0.5 if dtype == "float32" else 1)
    keys, others = new_keys(BLOCKS), new_keys(BLOCKS)
    with kvhearth.open(daemon.url(), contract) as cache:
        before = daemon.counters()["stored_bytes"]
        assert cache.store(keys, pages).result(HUNG_S).stored == BLOCKS
        stored = daemon.counters()["stored_bytes"] - before
        assert stored == share * pages.numel() * pages.element_size()
        back = torch.zeros_like(pages)
        loaded = cache.load(keys, back).result(HUNG_S)
        assert (loaded.usable_blocks, loaded.reason) == (BLOCKS, "")
        checked(codec, dtype, pages, back)
        # Separate blocks, and a page of two runs, take other ways through the copier.
        assert cache.store(others, list(pages)).result(HUNG_S).stored == BLOCKS
        layers = torch.zeros(2, *SHAPE[:1], *SHAPE[2:], dtype=pages.dtype)
        pool = kvhearth.PagedKV([layers[0], layers[1]])
        numbers = np.random.default_rng(1).permutation(BLOCKS)
        into = kvhearth.Pages(pool, numbers)
        assert cache.load(others, into).result(HUNG_S).usable_blocks == BLOCKS
        checked(codec, dtype, pages, layers[:, torch.from_numpy(numbers)].transpose(0, 1))


def test_a_lossless_client_never_reads_an_encoded_block(daemon: Daemon) -> None:
    import torch

    pages, keys = words("bfloat16"), new_keys(BLOCKS)
    lossless = kvhearth.contract_for(pages, model="m", revision="r")
    for codec in SHARES:
        with kvhearth.open(daemon.url(), lossless.with_codec(codec)) as cache:
            assert cache.store(keys, pages).result(HUNG_S).stored == BLOCKS
    with kvhearth.open(daemon.url(), lossless) as cache:
        back = torch.zeros_like(pages)
        assert cache.load(keys, back).result(HUNG_S).hit_blocks == 0
        assert cache.store(keys, pages).result(HUNG_S).stored == BLOCKS
        assert cache.load(keys, back).result(HUNG_S).usable_blocks == BLOCKS
        assert torch.equal(back, pages)


def test_encoded_blocks_come_back_from_ssd(tmp_path: Path) -> None:
    import torch

    codec, pages, keys = "int4", words("bfloat16"), new_keys(BLOCKS)
    contract = kvhearth.contract_for(pages, model="m", revision="r", codec=codec)
    ssd = {"ssd_dirs": [f"{tmp_path}=64MiB"], "ssd_segment_bytes": "1MiB", "http": "127.0.0.1:0"}
    with (
        running_daemon(**ssd) as daemon,
        kvhearth.open(daemon.url(), contract) as cache,
    ):
        assert cache.store(keys, pages).result(HUNG_S).stored == BLOCKS
        until(lambda: daemon.stats().ssd.blocks >= BLOCKS, "every block is on SSD")
        path = f"/v1/namespaces/{namespace_digest('default', contract).hex()}:evict"
        answer = ask(daemon, path, "POST", b'{"tier": "memory"}', admin=True).json
        assert (answer["evicted_blocks"], answer["ssd_blocks"]) == (BLOCKS, 0)
        back = torch.zeros_like(pages)
        assert cache.load(keys, back).result(HUNG_S).usable_blocks == BLOCKS
        checked(codec, "bfloat16", pages, back)


def test_each_group_has_its_own_encoding(daemon: Daemon) -> None:
    """State groups stay lossless, also where their pages have the size of others."""
    specs = tuple(
        kvhearth.GroupSpec(kind, 16, 4096)
        for kind in (kvhearth.GroupKind.FULL, kvhearth.GroupKind.MAMBA)
    )
    contract = kvhearth.Contract("m", "r", "bfloat16", specs).with_codec("fp8")
    page = np.random.default_rng(0).integers(0x3C00, 0x4000, (2, 1, 2048)).astype(np.uint16)
    kv = {group: kvhearth.PagedKV([page[group]]) for group in (0, 1)}
    client = kvhearth.connect(daemon.url(), contract, engine_id="e")
    pool = CopierPool(client, kv)
    try:
        assert client.wait_ready(HUNG_S)
        extents = client.reserve({0: 1, 1: 1})
        for group, wanted in ((0, 2048 + 64), (1, 4096)):
            copier = pool.copier(group, extents.boot_id)
            assert copier is not None
            ticket = copier.store(extents.boot_id, np.zeros(1, int), extents.groups[group][:, 0])
            assert ticket is not None
            assert ticket.kind is CopyKind.STORE
            done = copier.wait(ticket, HUNG_S)
            assert done is not None
            assert (done.bytes, done.reasons) == (wanted, {})
        client.abort(extents.groups, boot_id=extents.boot_id)
    finally:
        assert pool.close(HUNG_S)
        client.close()
