"""One engine of the measurement of TTFT: ``python -m kvhearth_lab.bench.gpu.ttft_engine``.

Its arguments are a job as JSON and the parent's process ID. It prints a line of JSON for itself and
one for each prompt.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

import kvhearth
from kvhearth.cache import Cache
from kvhearth.session.arena import ArenaMapping
from kvhearth_lab.bench.daemon import ATTACH_S, broken
from kvhearth_lab.bench.gpu.llama import KV, Geometry, Model, make_model, prefill
from kvhearth_lab.bench.gpu.ttft import BLOCK_TOKENS, COLD, WARM
from kvhearth_lab.harness.client_process import end_with

_DONE_S = 120.0
_REGISTERED_S = 60.0


class Engine:
    """A model, and a paged pool with blocks outermost: (blocks, layers, 2, heads, tokens, dim).

    Args:
        job: the parent's job.
    """

    def __init__(self, job: Mapping[str, Any]) -> None:
        self.torch: Any = importlib.import_module("torch")
        self.role = str(job["role"])
        self.device = str(job["device"])
        self.geometry = Geometry(**job["geometry"])
        self.repeats = int(job["repeats"])
        self.folder = Path(job["folder"])
        self._lengths = [int(each) for each in job["prompt_tokens"]]
        began_s = time.perf_counter()
        with self.torch.inference_mode():
            self.model: Model = make_model(
                self.torch, self.geometry, self.device, plain=bool(job["plain"])
            )
        self._pool = self._new_pool(max(self._lengths) // BLOCK_TOKENS)
        contract = kvhearth.contract_for(
            self._pool, model="bench-ttft", revision="1", block_tokens=BLOCK_TOKENS
        )
        self._synchronize()
        self.load_model_s = time.perf_counter() - began_s
        self.cache: Cache = kvhearth.open(str(job["url"]), contract, wait_s=ATTACH_S)

    def _new_pool(self, blocks: int) -> Any:
        of = self.geometry
        shape = (blocks, of.layers, 2, of.kv_heads, BLOCK_TOKENS, of.head_dim)
        return self.torch.zeros(shape, dtype=self.torch.bfloat16, device=self.device)

    def run(self) -> None:
        """Run all prompts, after one that warms the kernels up."""
        _say({"model": self.model.name, "load_model_s": round(self.load_model_s, 2)})
        self._step(prefill(self.torch, self.model, self._prompt(BLOCK_TOKENS, 99)), 1)
        _say({"registered_s": self._wait_registered()})
        for tokens in self._lengths:
            try:
                row = self._cold(tokens) if self.role == COLD else self._warm(tokens)
            except self.torch.cuda.OutOfMemoryError as error:
                _say({"short_of_memory": {str(tokens): str(error)[:200]}})
                continue
            _say({"rows": {str(tokens): row}})
        if not self.cache.close(_DONE_S):
            raise broken("transfers never end")

    def _wait_registered(self) -> float | None:
        """Wait until the arena is registered with CUDA, as it is some seconds after an engine's
        start. Return the seconds; None on the CPU, and where it stays unregistered.
        """
        began_s = time.perf_counter()
        # The first transfer makes the pages' copiers, and with them begins the registration.
        self.cache.load([b"nothing"], self._pool[:1]).result(_DONE_S)
        arena = self.cache.client.arena
        if self.device == "cpu" or not isinstance(arena, ArenaMapping):
            return None
        views = [self.torch.from_numpy(arena.view(segment)[-4096:]) for segment in arena.segments]
        while not all(view.is_pinned() for view in views):
            if time.perf_counter() - began_s > _REGISTERED_S:
                return None
            time.sleep(0.01)
        return round(time.perf_counter() - began_s, 3)

    def _cold(self, tokens: int) -> dict[str, Any]:
        prompt = self._prompt(tokens, tokens)
        prefill(self.torch, self.model, prompt)  # kernels are chosen by the length of a prompt
        self._synchronize()
        began_s = time.perf_counter()
        kv = prefill(self.torch, self.model, prompt)
        logits = self._step(kv, tokens)
        self._synchronize()
        cold_s = time.perf_counter() - began_s
        self._save(tokens, logits)
        pages = self._paged(kv)
        keys = self._keys(prompt)
        began_s = time.perf_counter()
        stored = self.cache.store(keys, pages).result(_DONE_S)
        if stored.stored + stored.duplicate < len(keys):
            raise broken(f"{stored.failed} of {len(keys)} blocks were not stored: {stored.reason}")
        return {
            "cold_s": round(cold_s, 5),
            "store_s": round(time.perf_counter() - began_s, 5),
            "bytes": pages.numel() * pages.element_size(),
        }

    def _warm(self, tokens: int) -> dict[str, Any]:
        prompt = self._prompt(tokens, tokens)
        keys = self._keys(prompt)
        times, lookups, copies = [], [], []
        for _ in range(self.repeats):
            self._pool.zero_()
            self._synchronize()
            began_s = time.perf_counter()
            hit = self.cache.lookup(keys).hit_blocks
            lookups.append(time.perf_counter() - began_s)
            pages = self._pool[: len(keys)]
            done = self.cache.load(keys, pages).result(_DONE_S)
            if hit < len(keys) or done.usable_blocks < len(keys):
                problem = f"{done.usable_blocks} of {len(keys)} blocks ({hit} hits)"
                raise broken(f"only {problem} were loaded: {done.reason} {done.failures}")
            logits = self._step(self._unpaged(pages), tokens)
            self._synchronize()
            times.append(time.perf_counter() - began_s)
            copies.append(done.copy_s)
        self._save(tokens, logits)
        return {
            "warm_s": round(times[0], 5),
            "warm_min_s": round(min(times), 5),
            "lookup_s": round(lookups[0], 5),
            "load_copy_s": round(copies[0], 5),
        }

    def _step(self, kv: KV, tokens: int) -> Any:
        """Return the logits of the token after the prompt."""
        token = self.torch.full((1, 1), tokens % self.geometry.vocabulary, device=self.device)
        return self.model.forward(token, kv)[0]

    def _prompt(self, tokens: int, seed: int) -> Any:
        drawn = np.random.default_rng(seed).integers(0, self.geometry.vocabulary, (1, tokens))
        return self.torch.from_numpy(drawn).to(self.device)

    def _keys(self, prompt: Any) -> list[bytes]:
        return list(kvhearth.chain_keys(prompt[0].tolist(), BLOCK_TOKENS))

    def _paged(self, kv: KV) -> Any:
        """Return KV as pages, in the pool's layout."""
        of = self.geometry
        blocks = kv[0][0].shape[2] // BLOCK_TOKENS
        pages = self._pool[:blocks]
        for layer, pair in enumerate(kv):
            for which, each in enumerate(pair):
                cut = each[0].view(of.kv_heads, blocks, BLOCK_TOKENS, of.head_dim)
                pages[:, layer, which].copy_(cut.transpose(0, 1))
        return pages

    def _unpaged(self, pages: Any) -> KV:
        """Return pages as KV by layer."""
        of = self.geometry
        tokens = pages.shape[0] * BLOCK_TOKENS
        dense = pages.permute(1, 2, 3, 0, 4, 5).reshape(of.layers, 2, 1, of.kv_heads, tokens, -1)
        return [(dense[layer, 0], dense[layer, 1]) for layer in range(of.layers)]

    def _save(self, tokens: int, logits: Any) -> None:
        np.save(self.folder / f"{self.role}-{tokens}.npy", logits.cpu().numpy())

    def _synchronize(self) -> None:
        if self.device != "cpu":
            self.torch.cuda.synchronize()


def _say(line: Mapping[str, Any]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def main(words: list[str]) -> None:
    """Run the job of the first word; end with the process that the second word names."""
    end_with(int(words[1]))
    job = json.loads(words[0])
    assert job["role"] in (COLD, WARM), job["role"]
    Engine(job).run()


if __name__ == "__main__":
    main(sys.argv[1:])
