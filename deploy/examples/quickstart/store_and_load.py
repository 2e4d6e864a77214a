"""Stores KV blocks in a daemon and loads them back; prints how to ask why a key is a miss.

Usage: ``store_and_load.py [URL]``; without one, this user's daemon, else the system's.
"""

import sys

import numpy as np

import kvhearth

pages = np.random.default_rng(0).random(
    (8, 2, 16, 4, 64), "float32"
)  # 8 blocks: K and V, 16 tokens
keys = kvhearth.chain_keys(tokens=range(8 * 16), block_tokens=16)
contract = kvhearth.contract_for(pages, model="llama-3-8b", revision="main", block_tokens=16)

url = sys.argv[1] if sys.argv[1:] else "kvhearth+unix:"
with kvhearth.open(url, contract) as cache:
    print(cache.lookup(keys).hit_blocks, "of 8 blocks were there")
    stored = cache.store(keys, pages).result()  # a future: the copies run on the cache's thread
    print(stored.stored, "stored,", stored.duplicate, "there already", stored.reason)

    again = np.zeros_like(pages)
    loaded = cache.load(keys, again).result()  # every block is verified by its checksum
    print(loaded.usable_blocks * 16, "tokens need no prefill", loaded.reason)
    assert (again[: loaded.usable_blocks] == pages[: loaded.usable_blocks]).all()
print("kvhearth explain", keys[0].hex())
