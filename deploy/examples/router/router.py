"""Sends the turns of dialogues to the engine that has most of their KV, or to each in turn.

    python router.py --engine http://127.0.0.1:8001 tcp://127.0.0.1:5557 \
                     --engine http://127.0.0.1:8002 tcp://127.0.0.1:5558

Runs in vLLM's environment: httpx, msgspec and pyzmq are all that it needs. It learns from vLLM's KV
events, which with KVHearth's connector tell the daemon's blocks too. A prompt's blocks are found by
their tokens, from parent to child: no hash is computed here.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from dataclasses import dataclass, field

import httpx
import msgspec
import zmq
import zmq.asyncio

WORTH = {"GPU": 1.0, "CPU": 0.9, "STORAGE": 0.6}
"""What a block on a medium is worth: a part of the time that it takes to compute it."""
LOAD = 256
"""Tokens of hits that one running request outweighs."""

Block = tuple[int | None, tuple[int, ...]]
"""Hash of the block before, and tokens."""


@dataclass
class Engine:
    """An engine, and where it has which blocks, by hash."""

    url: str
    events: str
    media: dict[int, dict[str, None]] = field(default_factory=dict)
    running: int = 0

    def apply(self, event: dict, tree: dict[Block, int]) -> None:
        """Enter an event of the engine."""
        hashes, medium = event.get("block_hashes", ()), event.get("medium") or "GPU"
        if event["type"] == "AllBlocksCleared":
            self.media.clear()
        elif event["type"] == "BlockRemoved":
            for each in hashes:
                self.media.get(each, {}).pop(medium, None)
        else:
            size, tokens, parent = (
                event["block_size"],
                event["token_ids"],
                event["parent_block_hash"],
            )
            for index, each in enumerate(hashes):
                self.media.setdefault(each, {})[medium] = None
                if tokens:  # else another engine stored it
                    tree[parent, tuple(tokens[index * size : (index + 1) * size])] = each
                parent = each

    def worth(self, path: list[int], size: int) -> float:
        """Return the tokens that the engine need not compute, less what its load is worth."""
        found = 0.0
        for each in path:
            if not (media := self.media.get(each)):
                break
            found += size * max(WORTH.get(medium, 0.0) for medium in media)
        return found - LOAD * self.running


class Router:
    """Chooses engines for prompts of a model whose blocks have ``block_tokens`` tokens."""

    def __init__(self, engines: list[Engine], model: str, block_tokens: int) -> None:
        self._engines, self._model, self._size = engines, model, block_tokens
        self._tree: dict[Block, int] = {}
        self._turn = 0
        self._http = httpx.AsyncClient(timeout=600.0)

    async def follow(self, engine: Engine) -> None:
        """Enter an engine's events for ever."""
        events = zmq.asyncio.Context.instance().socket(zmq.SUB)
        events.setsockopt(zmq.SUBSCRIBE, b"")
        events.connect(engine.events)
        while True:
            _, _, payload = await events.recv_multipart()
            for event in msgspec.msgpack.decode(payload)[1]:
                engine.apply(event, self._tree)

    def choose(self, prompt: list[int], policy: str) -> Engine:
        """Return the engine for a prompt."""
        self._turn += 1
        if policy == "round_robin":
            return self._engines[self._turn % len(self._engines)]
        path, parent, size = list[int](), None, self._size
        for start in range(0, len(prompt) - size + 1, size):
            found = self._tree.get((parent, tuple(prompt[start : start + size])))
            if found is None:
                break
            path.append(found)
            parent = found
        first = self._turn % len(self._engines)  # among equals, each in turn
        order = self._engines[first:] + self._engines[:first]
        return max(order, key=lambda engine: engine.worth(path, size))

    async def complete(self, prompt: list[int], policy: str) -> tuple[float, int]:
        """Send a prompt; return the seconds to its first token, and its tokens that were cached."""
        engine = self.choose(prompt, policy)
        url = f"{engine.url}/v1/completions"
        body = {"model": self._model, "prompt": prompt, "max_tokens": 8, "temperature": 0}
        body |= {"stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
        started, first_s, cached = time.monotonic(), 0.0, 0
        engine.running += 1
        try:
            async with self._http.stream("POST", url, json=body) as answer:
                answer.raise_for_status()
                async for line in answer.aiter_lines():
                    if not line.startswith("data: {"):
                        continue
                    first_s = first_s or time.monotonic() - started
                    usage = json.loads(line[6:]).get("usage") or {}
                    cached += (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        finally:
            engine.running -= 1
        return first_s, cached


def dialogues(seed: str, count: int, turns: int, vocabulary: int) -> list[list[list[int]]]:
    """Return the prompts of each dialogue, turn by turn: each turn adds to the one before."""
    source = random.Random(seed)

    def words(tokens: int) -> list[int]:
        return [source.randrange(vocabulary) for _ in range(tokens)]

    found = []
    for _ in range(count):
        history, prompts = words(source.randint(400, 900)), []
        for _ in range(turns):
            prompts.append(list(history))
            history += words(source.randint(60, 300))  # the answer, and the next question
        found.append(prompts)
    return found


async def run(router: Router, given: argparse.Namespace, policy: str) -> dict[str, float]:
    """Run a trace of dialogues that begin together; return its figures."""
    trace = dialogues(f"{given.seed} {policy}", given.dialogues, given.turns, given.vocabulary)
    taken, cached, asked = list[float](), 0, 0
    for turn in range(given.turns):
        order = list(range(given.dialogues))
        random.Random(f"{given.seed} {turn}").shuffle(order)
        for number in order:
            prompt = trace[number][turn]
            first_s, hit = await router.complete(prompt, policy)
            taken.append(first_s)
            cached, asked = cached + hit, asked + len(prompt)
        await asyncio.sleep(given.pause_s)  # people read, and events arrive
    ttft_ms = 1000 * statistics.median(taken)
    return {"hit_rate": round(cached / asked, 3), "ttft_ms": round(ttft_ms, 1)}


async def main(given: argparse.Namespace) -> None:
    """Run the trace by each policy, and print the figures of both."""
    engines = [Engine(url, events) for url, events in given.engine]
    router = Router(engines, given.model, given.block_tokens)
    followers = [asyncio.create_task(router.follow(engine)) for engine in engines]
    found = {policy: await run(router, given, policy) for policy in ("round_robin", "prefix")}
    for task in followers:
        task.cancel()
    if given.json:
        print(json.dumps(found))
        return
    for policy, figures in found.items():
        print(f"{policy:12} hit rate {figures['hit_rate']:.2f}  TTFT {figures['ttft_ms']:.0f} ms")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Route dialogues by the KV that engines have.")
    parser.add_argument("--engine", nargs=2, action="append", required=True, metavar="ADDRESS")
    parser.add_argument("--model", default="m", help="name that the engines serve")
    parser.add_argument("--block-tokens", type=int, default=16, help="vLLM's block size")
    parser.add_argument("--dialogues", type=int, default=8)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=256)
    parser.add_argument("--pause-s", type=float, default=0.5)
    parser.add_argument("--seed", default="1")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    asyncio.run(main(parser.parse_args()))
