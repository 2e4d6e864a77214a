"""Pins of agents whose dialogues are larger than memory: no store or load fails for a hint."""

from __future__ import annotations

import numpy as np
from support.daemon import running_daemon

import kvhearth
from kvhearth.contract import Contract, GroupKind, GroupSpec
from kvhearth.errors import Reason
from kvhearth.results import Pin

PAGE_BYTES, BLOCK_TOKENS = 4096, 16
AGENTS, TOKENS, MORE_TOKENS = 4, 100_000, 16_000


def contract(model: str, page_bytes: int) -> Contract:
    """Return a contract of one group."""
    groups = (GroupSpec(GroupKind.FULL, BLOCK_TOKENS, page_bytes),)
    return Contract(model=model, revision="1", kv_dtype="uint8", groups=groups)


def test_four_agents_of_100k_tokens_make_no_store_fail() -> None:
    """Pins may keep nearly all memory, and keep it; another model's pages are larger."""
    small = {"slab_bytes": "2MiB", "slot_bytes_min": "4KiB", "pinned_fraction_max": 0.98}
    with running_daemon(arena=False, memory="80MiB", **small) as daemon:
        url = daemon.url()
        with (
            kvhearth.open(url, contract("agents", PAGE_BYTES), wait_s=60) as agents,
            kvhearth.open(url, contract("other", 8 * PAGE_BYTES), wait_s=60) as other,
        ):
            pins: dict[int, list[Pin]] = {}
            for turn in range(3):
                for agent in range(AGENTS):
                    tokens = range(agent << 20, (agent << 20) + TOKENS + turn * MORE_TOKENS)
                    keys = kvhearth.chain_keys(tokens=tokens, block_tokens=BLOCK_TOKENS)
                    pages = np.zeros((len(keys), PAGE_BYTES), np.uint8)
                    assert not agents.store(keys, pages).result(60).reason
                    for pin in pins.pop(agent, []):
                        agents.client.unpin(pin)
                    parts = [keys[at : at + 100] for at in range(0, len(keys), 100)]
                    pins[agent] = [agents.client.pin({0: part}, 600) for part in parts]
                    start = (turn * AGENTS + agent) << 20
                    theirs = kvhearth.chain_keys(
                        tokens=range(start, start + 800), block_tokens=BLOCK_TOKENS
                    )
                    page = np.zeros((len(theirs), 8 * PAGE_BYTES), np.uint8)
                    assert not other.store(theirs, page).result(60).reason
                    assert other.load(theirs, page).result(60).loaded.all()
                segment = daemon.stats().segments[0]
                assert 0 < segment.pinned_bytes <= segment.capacity_bytes * 0.98
            refused = [pin.reason for pin in pins[AGENTS - 1]]
            assert Reason.TOO_MANY_PINS in refused, "the pins exceed their part"
