"""A small inference engine that keeps its KV in KVHearth. run.py starts it once for each life.

    python engine.py NAME DIRECTORY

reads ``DIRECTORY/plan.json``, answers one prompt, writes ``DIRECTORY/NAME.npy`` (logits of the
prompt's last position) and ``DIRECTORY/NAME.json``, and waits until its standard input is closed or
it is killed.

``Hearth`` holds all uses of KVHearth; the transformer and its paged pool are in model.py. There is
no "cold" or "warm" mode: the engine always looks up first, and always stores the blocks that it had
to compute. Without a daemon each of the calls below is a miss, and the engine answers all the same.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from model import PagedPool, Sequence, Sizes, Transformer, load_tokenizer, prompt_tokens

from kvhearth import Contract, GroupKind, GroupSpec, connect
from kvhearth.copiers import BlockFailure, Done, HostCopier
from kvhearth.keys import chain_keys
from kvhearth.model import I64, Records
from kvhearth.page_layout import PagedKV
from kvhearth.results import CommitGroup, LookupResult

GROUP = 0
"""The only KV cache group: all layers attend to everything."""
READY_TIMEOUT_S = 20.0
PROMOTION_TIMEOUT_S = 5.0
DRAIN_TIMEOUT_S = 30.0


@dataclass
class Loaded:
    """Result of a load. ``seconds`` covers everything: lookup, copies, comparison of checksums."""

    asked_blocks: int = 0
    found_blocks: int = 0
    good_blocks: int = 0
    bytes: int = 0
    seconds: float = 0.0
    copy_seconds: float = 0.0
    miss_reason: str = ""
    failed: dict[str, int] = field(default_factory=dict)
    extents: Records | None = None


@dataclass
class Stored:
    """Result of the stores. Copies run beside the prefill; calls are the engine's own time."""

    blocks: int = 0
    already_there_blocks: int = 0
    refused_blocks: int = 0
    bytes: int = 0
    copy_seconds: float = 0.0
    call_seconds: float = 0.0


@dataclass(frozen=True)
class _Batch:
    """A store under way: its keys and their extents."""

    keys: list[bytes]
    parent: bytes
    extents: Records
    boot_id: str


class Hearth:
    """One engine's connection to KVHearth: decisions through the client, bytes through the copier.

    Nothing here raises because the daemon is away, slow or wrong: answers are misses then.
    """

    def __init__(self, url: str, contract: Contract, pool: PagedPool) -> None:
        # This process is both the scheduler, which decides, and rank 0, which moves bytes.
        self._client = connect(url, contract, engine_id="demo", scheduler=True, rank=0)
        self._kv = PagedKV(pool.layers)
        self._copier: HostCopier | None = None
        self._copier_boot = ""
        self._batches: dict[int, _Batch] = {}
        self.stored = Stored()

    def wait_ready(self, timeout_s: float) -> bool:
        """Wait for the daemon. The demo wants a hit; a real engine would serve and not wait."""
        return self._client.wait_ready(timeout_s)

    def why_away(self) -> str:
        """Return the reason why there is no cache, in a sentence."""
        refusal = self._client.refusal
        return refusal.message if refusal is not None else "KVHearth is away"

    def load(self, keys: list[bytes], pages: I64) -> Loaded:
        """Copy the longest good prefix of the blocks ``keys`` into ``pages``."""
        started = time.perf_counter()
        found = self._lookup(keys)
        loaded = Loaded(asked_blocks=len(keys), miss_reason=found.reason)
        copier = self._copier_for(found.boot_id)
        if copier is None:
            self._client.release(found.lease)  # which may be None
        elif found.lease is not None:
            extents = found.groups[GROUP].extents  # the blocks before the first hole
            # Done in this thread: the engine has nothing else to do until the bytes are there. With
            # other requests to serve it would use copier.load and copier.poll.
            done = copier.load_now(found.boot_id, extents, pages[: len(extents)])
            bad = extents[~done.ok] if done.reasons.get(BlockFailure.CHECKSUM_MISMATCH) else None
            self._client.release(found.lease, bad=bad)
            # One bad block ends the prefix: the blocks after it are of no use without it.
            loaded.good_blocks = len(extents) if done.ok.all() else int(done.ok.argmin())
            loaded.found_blocks, loaded.extents = len(extents), extents
            loaded.bytes, loaded.copy_seconds = done.bytes, done.seconds
            loaded.failed = done.reasons
        loaded.seconds = time.perf_counter() - started
        return loaded

    def _lookup(self, keys: list[bytes]) -> LookupResult:
        """Look up all keys at once; wait a little for blocks that are present but not ready yet.

        After a restart the daemon checksums each adopted block before it serves it.
        """
        self._client.prefetch({GROUP: keys})
        until = time.monotonic() + PROMOTION_TIMEOUT_S
        while True:
            found = self._client.lookup({GROUP: keys}, lease=True, prefetch=True)
            group = found.groups[GROUP]
            promotions = int(group.present.sum()) - int(group.ready.sum())
            if found.reason or not promotions or time.monotonic() > until:
                return found
            if found.lease is not None:
                self._client.release(found.lease)
            time.sleep(min(max(found.eta_us / 1e6, 0.002), 0.05))

    def store(self, keys: list[bytes], parent: bytes, pages: I64) -> None:
        """Begin to store full blocks: reserve slots and start the copies, but do not wait."""
        started = time.perf_counter()
        self._commit_finished()
        room = self._client.reserve({GROUP: len(keys)})
        extents = room.groups.get(GROUP)
        copier = self._copier_for(room.boot_id)
        count, ticket = 0, None
        if extents is not None and len(extents):
            if copier is not None:
                # May be fewer than requested: the chain's end is then not kept. One shard per
                # block.
                count = len(extents)
                ticket = copier.store(room.boot_id, pages[:count], extents.reshape(-1))
            if ticket is None:  # the daemon has just died, or the copier's queue is full
                self._client.abort({GROUP: extents}, boot_id=room.boot_id)
                count = 0
            else:
                self._batches[ticket.number] = _Batch(keys[:count], parent, extents, room.boot_id)
        self.stored.refused_blocks += len(keys) - count
        self.stored.call_seconds += time.perf_counter() - started

    def _commit_finished(self) -> None:
        """Bind keys to the blocks whose copies have ended since the last call."""
        for done in self._copier.poll() if self._copier else []:
            self._commit(self._batches.pop(done.ticket.number), done)

    def _commit(self, batch: _Batch, done: Done) -> None:
        # Commit only the part before the first failed copy: a chain with a hole is of no use.
        count = len(done.ok) if done.ok.all() else int(done.ok.argmin())
        if count < len(done.ok):
            self._client.abort({GROUP: batch.extents[count:]}, boot_id=batch.boot_id)
            self.stored.refused_blocks += len(done.ok) - count
        if not count or done.checksums is None:
            return
        sums = done.checksums[:count].reshape(count, 1, -1)
        blocks = CommitGroup(batch.keys[:count], batch.extents[:count], sums, batch.parent)
        result = self._client.commit({GROUP: blocks}, boot_id=batch.boot_id)
        bound = int(result.stored[GROUP].sum())
        self.stored.blocks += bound
        if result.reason:
            self.stored.refused_blocks += count
        else:
            self.stored.already_there_blocks += count - bound
        self.stored.bytes += done.bytes
        self.stored.copy_seconds += done.seconds

    def finish_stores(self) -> None:
        """Wait for the copies under way and commit them."""
        if self._copier is not None:
            self._copier.drain(DRAIN_TIMEOUT_S)
        started = time.perf_counter()
        self._commit_finished()
        self.stored.call_seconds += time.perf_counter() - started

    def counters(self) -> dict[str, int]:
        """Return the client's counters that are not zero."""
        return {name: count for name, count in self._client.counters().items() if count}

    def boot_id(self) -> str:
        """Return the boot id of the daemon that this engine is attached to, or ""."""
        return self._client.boot_id

    def _copier_for(self, boot_id: str) -> HostCopier | None:
        """Return the copier into that boot's arena; a restarted daemon has another arena."""
        arena = self._client.arena
        if arena is None or not boot_id or arena.boot_id != boot_id:
            return None
        if self._copier is None or self._copier_boot != boot_id:
            if self._copier is not None:
                self._copier.close(DRAIN_TIMEOUT_S)
                self._batches.clear()  # a dead daemon's reservations are gone with it
            self._copier, self._copier_boot = HostCopier(self._kv, arena), boot_id
            # The client waits for the copies made under a session before it closes the session.
            self._client.add_quiesce_hook(self._copier.drain)
        return self._copier


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
        attached = self._hearth.wait_ready(READY_TIMEOUT_S)
        self._say(
            f"{self._model.parameters / 1e6:.0f} M parameters, pool of {pages + 8} pages of "
            f"{sizes.page_bytes / 2**20:.2f} MiB; "
            + (
                "attached to KVHearth"
                if attached
                else f"goes on without: {self._hearth.why_away()}"
            )
        )

    def answer(self) -> tuple[np.ndarray[Any, Any], dict[str, Any]]:
        """Return the logits of the prompt's last position, and the report of the run."""
        plan, block = self._plan, self._pool.sizes.block_tokens
        started = time.perf_counter()
        tokens = prompt_tokens(self._tokenizer, plan["tokens"])
        keys = chain_keys(tokens, block)
        sequence = Sequence(self._pool, len(tokens) + plan["answer_tokens"])

        # The last token is always computed: its logits are the answer's beginning.
        wanted = keys[: (len(tokens) - 1) // block]
        loaded = self._hearth.load(wanted, sequence.pages[: len(wanted)])
        sequence.length = hit_tokens = loaded.good_blocks * block
        missing = len(tokens) - hit_tokens
        self._say(f"{hit_tokens} of {len(tokens)} tokens found, computes {missing}")
        kept_blocks = loaded.good_blocks

        def keep() -> None:
            nonlocal kept_blocks
            full = sequence.length // block
            if full > kept_blocks:
                parent = keys[kept_blocks - 1] if kept_blocks else b""
                self._hearth.store(keys[kept_blocks:full], parent, sequence.pages[kept_blocks:full])
            kept_blocks = full

        logits = self._model.prefill(tokens, sequence, keep)
        ttft_s = time.perf_counter() - started
        self._say(f"first token after {ttft_s:.2f} s")
        answer = self._model.decode(logits, sequence, plan["answer_tokens"])
        self._hearth.finish_stores()
        middle = len(wanted) // 2
        values = logits.numpy().copy()
        return values, {
            "pid": os.getpid(),
            "boot_id": self._hearth.boot_id(),
            "prompt_tokens": len(tokens),
            "hit_tokens": hit_tokens,
            "computed_tokens": len(tokens) - hit_tokens,
            "ttft_s": ttft_s,
            "answer": answer,
            "load": {k: v for k, v in vars(loaded).items() if k != "extents"},
            "store": asdict(self._hearth.stored),
            "middle_block": middle,
            "middle_extent": _extent(loaded.extents, middle),
            "middle_block_effect": self._effect(tokens, sequence, middle, values),
            "counters": self._hearth.counters(),
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


def _extent(extents: Records | None, index: int) -> dict[str, int] | None:
    if extents is None or index >= len(extents):
        return None
    return {name: int(extents[index][name]) for name in ("segment", "offset", "length")}


def main() -> None:
    """Answer, report, wait to be ended."""
    name, directory = sys.argv[1], Path(sys.argv[2])
    plan = json.loads((directory / "plan.json").read_text())
    logits, report = Engine(plan, name, directory).answer()
    np.save(directory / f"{name}.npy", logits)
    unfinished = directory / f"{name}.json.part"
    unfinished.write_text(json.dumps(report))
    unfinished.rename(directory / f"{name}.json")
    sys.stdin.buffer.read()  # ends with run.py, however that ends


if __name__ == "__main__":
    main()
