"""A small inference engine that keeps its KV in KVHearth. run.py starts it once for each life.

    python engine.py NAME DIRECTORY

reads ``DIRECTORY/plan.json``, answers one prompt, writes ``DIRECTORY/NAME.npy`` (logits of the
prompt's last position) and ``DIRECTORY/NAME.json``, and waits until its standard input is closed or
it is killed.

``Hearth`` holds all uses of KVHearth; the transformer and its paged pool are in model.py. There is
no "cold" or "warm" mode: the engine always loads first, and always stores the blocks that it had to
compute. Without a daemon each of the calls below is a miss, and the engine answers all the same.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from model import PagedPool, Sequence, Sizes, Transformer, load_tokenizer, prompt_tokens

import kvhearth
from kvhearth import Contract, GroupKind, GroupSpec, Pages, StoreResult, Transfer
from kvhearth.model import I64

READY_TIMEOUT_S = 20.0
PROMOTION_TIMEOUT_S = 5.0
DRAIN_TIMEOUT_S = 30.0


class Hearth:
    """One engine's use of KVHearth.

    Nothing here raises because the daemon is away, slow or wrong: answers are misses then.
    """

    def __init__(self, url: str, contract: Contract, pool: PagedPool) -> None:
        # The demo wants a hit and waits for the daemon; a real engine would serve and not wait.
        self._cache = kvhearth.open(url, contract, name="demo", wait_s=READY_TIMEOUT_S)
        self._pool = kvhearth.PagedKV(pool.layers)
        self._stores: list[Transfer[StoreResult]] = []
        self._call_s = 0.0
        self.client = self._cache.client

    def why_away(self) -> str:
        """Return the reason why there is no cache, in a sentence, or nothing."""
        if self.client.boot_id:
            return ""
        refusal = self.client.refusal
        return refusal.message if refusal is not None else "KVHearth is away"

    def load(self, keys: list[bytes], pages: I64) -> dict[str, Any]:
        """Copy the longest good prefix of the blocks ``keys`` into ``pages``; return a report."""
        started = time.perf_counter()
        # The engine has nothing else to do until the bytes are there. With other requests to serve
        # it would ask the future later. After a restart the daemon checksums each adopted block
        # before it serves it: the load waits for those as for blocks on SSD.
        loaded = self._cache.load(keys, Pages(self._pool, pages), wait_s=PROMOTION_TIMEOUT_S)
        done = loaded.result()
        return {
            "asked_blocks": len(keys),
            "found_blocks": done.hit_blocks,
            # One bad block ends the prefix: the blocks after it are of no use without it.
            "good_blocks": done.usable_blocks,
            "bytes": done.bytes,
            "seconds": time.perf_counter() - started,
            "copy_seconds": done.copy_s,
            "miss_reason": done.reason,
            "failed": done.failures,
        }

    def store(self, keys: list[bytes], parent: bytes | None, pages: I64) -> None:
        """Begin to store full blocks; copies and calls run beside the prefill."""
        started = time.perf_counter()
        self._stores.append(self._cache.store(keys, Pages(self._pool, pages), parent=parent))
        self._call_s += time.perf_counter() - started

    def finish_stores(self) -> dict[str, Any]:
        """Wait for the stores under way; return a report of all."""
        started = time.perf_counter()
        done = [store.result(DRAIN_TIMEOUT_S) for store in self._stores]
        return {
            "blocks": sum(one.stored for one in done),
            "already_there_blocks": sum(one.duplicate for one in done),
            "refused_blocks": sum(one.failed for one in done),
            "bytes": sum(one.bytes for one in done),
            "copy_seconds": sum(one.copy_s for one in done),
            "call_seconds": self._call_s + time.perf_counter() - started,
        }

    def extent(self, keys: list[bytes], index: int) -> dict[str, int] | None:
        """Return where the daemon keeps a block, for the demo to damage it."""
        found = self.client.lookup({0: keys})
        extents = found.groups[0].extents
        self.client.release(found.lease)
        if index >= len(extents):
            return None
        return {name: int(extents[index][name]) for name in ("segment", "offset", "length")}


def contract_of(sizes: Sizes) -> Contract:
    """Return the contract: everything that must be equal for two engines to share KV bytes."""
    group = GroupSpec(
        GroupKind.FULL,
        block_tokens=sizes.block_tokens,
        page_bytes=sizes.page_bytes,
        layers=sizes.layers,
        token_bytes=sizes.token_bytes,
    )
    return Contract(
        model="demo-llama",
        revision=sizes.digest,
        kv_dtype="float32",
        model_dtype="float32",
        groups=(group,),
        layout="L2NHD",
    )


class Engine:
    """Answers prompts; computes only the tokens that KVHearth does not bring back."""

    def __init__(self, plan: dict[str, Any], name: str, directory: Path) -> None:
        self._say = lambda text: print(f"  [engine {name}] {text}", flush=True)
        self._plan = plan
        sizes = Sizes(**plan["sizes"])
        self._tokenizer = load_tokenizer(directory / "tokenizer.json", sizes.vocab)
        self._model = Transformer(sizes)
        pages = -(-(plan["tokens"] + plan["answer_tokens"]) // sizes.block_tokens)
        self._pool = PagedPool(sizes, pages + 8, order_seed=os.getpid())
        # A warm-up step, as in real engines: the first call of everything is slow in every process.
        self._model.step(list(range(sizes.block_tokens)), Sequence(self._pool, sizes.block_tokens))
        self._hearth = Hearth(plan["url"], contract_of(sizes), self._pool)
        why_away = self._hearth.why_away()
        self._say(
            f"{self._model.parameters / 1e6:.0f} M parameters, pool of {pages + 8} pages of "
            f"{sizes.page_bytes / 2**20:.2f} MiB; "
            + (f"goes on without: {why_away}" if why_away else "attached to KVHearth")
        )

    def answer(self) -> tuple[np.ndarray[Any, Any], dict[str, Any]]:
        """Return the logits of the prompt's last position, and the report of the run."""
        plan, block = self._plan, self._pool.sizes.block_tokens
        started = time.perf_counter()
        tokens = prompt_tokens(self._tokenizer, plan["tokens"])
        keys = kvhearth.chain_keys(tokens, block)
        sequence = Sequence(self._pool, len(tokens) + plan["answer_tokens"])

        # The last token is always computed: its logits are the answer's beginning.
        wanted = keys[: (len(tokens) - 1) // block]
        loaded = self._hearth.load(wanted, sequence.pages[: len(wanted)])
        sequence.length = hit_tokens = loaded["good_blocks"] * block
        missing = len(tokens) - hit_tokens
        self._say(f"{hit_tokens} of {len(tokens)} tokens found, computes {missing}")
        kept_blocks = loaded["good_blocks"]

        def keep() -> None:
            nonlocal kept_blocks
            full = sequence.length // block
            if full > kept_blocks:
                parent = keys[kept_blocks - 1] if kept_blocks else None
                self._hearth.store(keys[kept_blocks:full], parent, sequence.pages[kept_blocks:full])
            kept_blocks = full

        logits = self._model.prefill(tokens, sequence, keep)
        ttft_s = time.perf_counter() - started
        self._say(f"first token after {ttft_s:.2f} s")
        answer = self._model.decode(logits, sequence, plan["answer_tokens"])
        stored = self._hearth.finish_stores()
        middle = len(wanted) // 2
        values = logits.numpy().copy()
        return values, {
            "pid": os.getpid(),
            "boot_id": self._hearth.client.boot_id,
            "prompt_tokens": len(tokens),
            "hit_tokens": hit_tokens,
            "computed_tokens": len(tokens) - hit_tokens,
            "ttft_s": ttft_s,
            "answer": answer,
            "load": loaded,
            "store": stored,
            "middle_block": middle,
            "middle_extent": self._hearth.extent(wanted, middle),
            "middle_block_effect": self._effect(tokens, sequence, middle, values),
            "counters": self._hearth.client.counters(),
        }

    def _effect(
        self, tokens: list[int], sequence: Sequence, block: int, logits: np.ndarray[Any, Any]
    ) -> float:
        """Return the largest difference of the logits if one block's KV were lost.

        A demo whose logits do not depend on the restored KV would prove nothing.
        """
        for layer in self._pool.layers:
            layer[sequence.table[block]] = 0.0
        sequence.length = (len(tokens) - 1) // self._pool.sizes.block_tokens
        sequence.length *= self._pool.sizes.block_tokens
        wrong = self._model.step(tokens[sequence.length :], sequence)
        return float(np.abs(wrong.numpy() - logits).max())


def main() -> None:
    """Answer, report, wait to be ended."""
    name, directory = sys.argv[1], Path(sys.argv[2])
    plan = json.loads((directory / "plan.json").read_text(encoding="utf-8"))
    logits, report = Engine(plan, name, directory).answer()
    np.save(directory / f"{name}.npy", logits)
    unfinished = directory / f"{name}.json.part"
    unfinished.write_text(json.dumps(report), encoding="utf-8")
    unfinished.rename(directory / f"{name}.json")
    sys.stdin.buffer.read()  # ends with run.py, however that ends


if __name__ == "__main__":
    main()
