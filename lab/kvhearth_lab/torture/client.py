"""A client process of the kit: obeys its parent's commands, makes traffic, reports its
observations.

Commands arrive as JSON lines on stdin. Observations leave as JSON lines on stdout at once, because
the process may be killed at any moment.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import queue
import random
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from kvhearth import Cache, PagedKV, Pages
from kvhearth import failpoints as faults
from kvhearth.errors import KVHearthError
from kvhearth_lab.harness.client_process import end_with
from kvhearth_lab.harness.engine import (
    PAGES,
    Engine,
    Seen,
    content,
    contract_of,
    hung,
    key_of,
)
from kvhearth_lab.torture.report import Metronome

_BEAT_S = 0.25
_RETRY_S = 0.01
_PORTION = 16
_PROMOTION_S = 2.0
_SUSPECTS_S = 8.0
"""Time for blocks that need not be there; the required blocks have their whole time after it."""
_KEEP_NUMBERS = 4000
_DONE_S = 20.0
_STORE_WAIT_S = 0.4
Line = dict[str, Any]


class Mouth:
    """Writes lines. Thread-safe."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lock = threading.Lock()

    def say(self, **line: Any) -> None:
        """Write one line at once."""
        data = (json.dumps(line, separators=(",", ":")) + "\n").encode()
        with self._lock:
            while data:
                data = data[os.write(self._descriptor, data) :]


class CacheUser:
    """Stores and loads through the simple API, beside an engine of one rank.

    Stores are of a pool's pages, loads go to arrays and lists in turn.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._size = engine.contract.groups[0].page_bytes
        self._cache = Cache(
            engine.client,
            queue_blocks_max=4 * PAGES,
            batch_bytes=8 * self._size,
            store_wait_s=_STORE_WAIT_S,
        )
        self._pages = np.zeros((2 * PAGES, self._size), np.uint8)
        self._pool = PagedKV([self._pages])
        self._turn = 0

    def store(self, numbers: Sequence[int], parent: int) -> tuple[list[int], str]:
        """Variant of ``Engine.store`` that reports all of the blocks as stored, or none."""
        engine, epoch = self._engine, self._engine.epoch
        keys = engine.keys(numbers)
        for page, key in enumerate(keys):
            self._pages[page] = content(key, 0, epoch, self._size)
        before = None if parent < 0 else key_of(engine.model, parent)
        with engine.clock.timed("cache_store"):
            future = self._cache.store(keys, Pages(self._pool, range(len(keys))), parent=before)
            try:
                done = future.result(_DONE_S)
            except TimeoutError:
                raise hung("a store") from None
        whole = not done.failed and epoch == engine.epoch >= 0
        return (list(numbers) if whole else []), done.reason

    def load(self, numbers: Sequence[int]) -> Seen:
        """Load a chain and compare the blocks reported as loaded."""
        engine, seen = self._engine, Seen()
        keys, epoch = engine.keys(numbers), engine.epoch
        blocks = np.zeros((len(numbers), self._size), np.uint8)
        self._turn += 1
        with engine.clock.timed("cache_load"):
            future = self._cache.load(keys, list(blocks) if self._turn % 2 else blocks, wait_s=0.0)
            try:
                done = future.result(_DONE_S)
            except TimeoutError:
                raise hung("a load") from None
        if done.reason:
            seen.failed[done.reason] += 1
        for number, block, key, flag in zip(numbers, blocks, keys, done.loaded, strict=True):
            if not flag or epoch != engine.epoch:
                continue
            if np.array_equal(block, content(key, 0, epoch, self._size)):
                seen.right.append(number)
            else:
                seen.wrong.append(
                    f"{engine.model} block {number} epoch {epoch}: loaded other bytes"
                )
        return seen

    def close(self) -> bool:
        """Close the cache, with the engine's client; False if copies do not drain."""
        return self._cache.close(_DONE_S)


class Worker:
    """One engine and the commands that it obeys."""

    def __init__(self, mouth: Mouth, start: Line) -> None:
        self._say = mouth.say
        self._rng = random.Random(start["seed"])
        model = start["model"]
        contract = contract_of(start["page_bytes"], shards=start["shards"], model=model)
        self._engine = Engine(
            start["url"], contract, start["engine_id"], key_of=partial(key_of, model)
        )
        self._clock = self._engine.clock
        self._cache = CacheUser(self._engine) if start["cache"] else None
        self._known: list[int] = []
        self._again: list[int] = []
        """Blocks of older weights that are stored again, as the same prompts return."""
        self._next = int(start["first"])
        self._stores_left = 0
        self._left: list[Callable[[], object]] = []
        """Ends what the session would otherwise leave until it ends: leases and reservations."""
        self._going = False
        self._commands: queue.Queue[Line | None] = queue.Queue()
        self._verbs: dict[str, Callable[[Line], Line | None]] = {
            "go": self._go,
            "pause": self._pause,
            "check": self._check,
            "arm": self._arm,
            "cut": self._cut,
            "starve": self._starve,
            "bump": self._bump,
        }

    def run(self) -> int:
        """Run until the end command, or until the parent is gone."""
        threading.Thread(target=self._listen, daemon=True).start()
        threading.Thread(target=self._beat, daemon=True).start()
        while True:
            try:
                command = self._commands.get(timeout=None if not self._going else 0.001)
            except queue.Empty:
                self._act()
                continue
            if command is None or command["do"] == "end":
                return self._end(command)
            answer = self._verbs[command["do"]](command) or {}
            self._tell()
            self._say(did=command["do"], id=command.get("id", 0), **answer)

    def _listen(self) -> None:
        for line in sys.stdin:
            self._commands.put(json.loads(line))
        self._commands.put(None)

    def _beat(self) -> None:
        """Report periodically the current operation, and times in which the process could not
        run.
        """
        metronome = Metronome(lambda begin, end: self._say(late=[begin, end]))
        metronome.start()
        while True:
            time.sleep(_BEAT_S)
            doing, since = self._clock.doing
            self._say(beat=doing, since=since)

    # -- traffic -----------------------------------------------------------------------------------

    def _act(self) -> None:
        engine, rng = self._engine, self._rng
        if not engine.ready:
            # The daemon is away: miss at once, then pause.
            self._note(engine.check(self._some(4), prefetch=False))
            engine.client.wait_ready(0.02)
            time.sleep(0.005)
        elif (choice := rng.random()) < 0.5:
            self._store()
        elif choice < 0.8:
            self._note(self._load(rng.randint(1, 24)))
        elif choice < 0.9:
            taken = engine.reserve(rng.randint(1, 6))
            end = partial(engine.client.abort, taken.groups, boot_id=taken.boot_id)
            ended = rng.random() < 0.7
            doubted = ended and rng.random() < 0.5
            if ended:
                end(in_doubt=doubted)
            if doubted or not ended:
                self._left.append(end)
        elif choice < 0.94:
            engine.pin(self._some(4), 0.3)
        elif choice < 0.97:
            engine.client.prefetch({0: engine.keys(self._some(16))})
        else:
            # Take a promotion without a waiter, and a lease.
            found = engine.client.lookup({0: engine.keys(self._some(3))}, prefetch=True)
            self._left.append(partial(engine.client.release, found.lease))
        self._tell()

    def _store(self) -> None:
        rng, engine = self._rng, self._engine
        count = min(rng.randint(1, 12), self._stores_left)
        numbers, self._again = self._again[:count], self._again[count:]
        fresh = count - len(numbers)
        numbers += range(self._next, self._next + fresh)
        self._next += fresh
        self._stores_left -= count
        if not count or rng.random() < 0.2:
            numbers += self._some(rng.randint(1, 4))
        numbers = list(dict.fromkeys(numbers))
        epoch = engine.epoch
        if epoch < 0 or not numbers:
            return
        parent = self._some(1)
        self._say(tried=numbers, epoch=epoch)
        if self._cache is not None and rng.random() < 0.5:
            bound, reason = self._cache.store(numbers, parent[0] if parent else -1)
        else:
            done = engine.store(
                numbers, sums=rng.random() < 0.7, parent=parent[0] if parent else None
            )
            bound, reason = done.bound, done.reason
        if reason:
            self._clock.counts[f"store_not: {reason}"] += 1
        if bound and epoch == engine.epoch:
            self._say(bound=bound, epoch=epoch)
            self._known = (self._known + bound)[-_KEEP_NUMBERS:]

    def _load(self, count: int) -> Seen:
        if self._cache is not None and self._rng.random() < 0.5:
            return self._cache.load(self._some(count))
        return self._engine.check(self._some(count), prefetch=True)

    def _some(self, count: int) -> list[int]:
        numbers = self._known or [self._next]
        return self._rng.sample(numbers, min(count, len(numbers)))

    def _note(self, seen: Seen) -> None:
        self._clock.counts["compared"] += len(seen.right)
        for text in seen.wrong:
            self._say(wrong=text)
        for text in seen.caught:
            self._say(caught=text)
        for reason, amount in seen.failed.items():
            self._clock.counts[f"load_not: {reason}"] += amount

    def _tell(self) -> None:
        counts, slow = dict(self._clock.counts), list(self._clock.slow)
        self._clock.counts.clear()
        self._clock.slow.clear()
        if counts or slow:
            self._say(counts=counts, slow=slow)

    # -- commands ----------------------------------------------------------------------------------

    def _go(self, command: Line) -> None:
        self._stores_left = command["stores"]
        self._known = list(dict.fromkeys([*self._known, *command["known"]]))[-_KEEP_NUMBERS:]
        self._going = True

    def _pause(self, _: Line) -> None:
        self._going = False
        # Checks need room: a single slot that is left keeps its slab from blocks of other sizes.
        for end in self._left:
            end()
        self._left.clear()

    def _check(self, command: Line) -> Line:
        """Compare blocks until all were right or the time is over, a few at a time: more than
        memory has room for cannot be promoted together. Suspects need not be there.
        """
        engine, end = self._engine, time.monotonic() + command["deadline_s"]
        left = list(command["numbers"])
        try:
            engine.wait_ready(command["deadline_s"])
        except KVHearthError as error:
            return {"ready": False, "refusal": str(error), "left": left}
        begin = time.monotonic()
        for portion in _portions(command["suspects"]):
            if time.monotonic() - begin > _SUSPECTS_S:
                break
            self._promote(portion, Seen())
        end += time.monotonic() - begin
        before = len(left)
        last = Seen()
        while left:
            last, now = Seen(), left
            for portion in _portions(now):
                right = self._promote(portion, last)
                left = [number for number in left if number not in right]
            if time.monotonic() > end:
                break
        return {
            "ready": True,
            "epoch": engine.epoch,
            "right": before - len(left),
            "left": left,
            "absent": sorted(set(last.absent) & set(left)),
            "below": sorted(set(last.lower_tier) & set(left)),
            "reason": last.reason,
            "failed": dict(last.failed),
        }

    def _promote(self, portion: list[int], last: Seen) -> set[int]:
        """Return the blocks of a portion that were right, after a limited wait for their
        promotion.
        """
        right: set[int] = set()
        begin = time.monotonic()
        while True:
            left = [number for number in portion if number not in right]
            seen = self._engine.check(left, prefetch=True)
            self._note(seen)
            right |= set(seen.right)
            waited_s = time.monotonic() - begin
            if seen.reason or not seen.lower_tier or waited_s > _PROMOTION_S:
                break
            time.sleep(_RETRY_S)
        if waited_s > _RETRY_S and not seen.lower_tier and not seen.reason:
            self._say(promotion_s=waited_s)
        last.absent += seen.absent
        last.lower_tier += seen.lower_tier
        last.failed.update(seen.failed)
        last.reason = seen.reason or last.reason
        self._tell()
        if len(right) < len(portion):
            time.sleep(_RETRY_S)
        return right

    def _arm(self, command: Line) -> None:
        faults.arm(command["fault"])

    def _cut(self, command: Line) -> Line:
        """Shut down connections to the daemon while they are in use: ``what`` is life or calls. A
        remote client's are all cut.
        """
        name = {"life": "attach.sock", "calls": "calls.sock"}[command["what"]]
        cut = 0
        for number in _descriptors():
            try:
                with socket.socket(fileno=os.dup(number)) as one:
                    peer = one.getpeername()
                    if isinstance(peer, tuple) or str(peer).endswith(name):
                        one.shutdown(socket.SHUT_RDWR)
                        cut += 1
            except (OSError, UnicodeDecodeError):
                continue
        return {"cut": cut}

    def _starve(self, command: Line) -> Line:
        """Allow no new descriptor for a while: those that the daemon sends get lost on the way."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(_descriptors()) + 3, hard))
        try:
            cut = self._cut({"what": "life"})
            time.sleep(command["for_s"])
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        return cut

    def _bump(self, command: Line) -> Line:
        self._again = self._known[-PAGES:]
        label = command.get("label") or None
        return {"epoch": self._engine.client.bump_epoch(label=label)}

    def _end(self, command: Line | None) -> int:
        closed = self._cache is None or self._cache.close()
        try:
            self._engine.close()
        except KVHearthError as error:
            logging.error("%s", error)
            closed = False
        self._tell()
        if command is not None:
            self._say(did="end", id=command.get("id", 0), closed=closed)
        return 0 if closed else 3


def _portions(numbers: list[int]) -> list[list[int]]:
    return [numbers[start : start + _PORTION] for start in range(0, len(numbers), _PORTION)]


def _descriptors() -> list[int]:
    return [int(name) for name in os.listdir("/proc/self/fd")]


def main(words: Sequence[str]) -> int:
    """Run ``python -m kvhearth_lab.torture.client JSON PARENT``."""
    end_with(int(words[1]))
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends it
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    start = json.loads(words[0])
    return Worker(Mouth(sys.stdout.fileno()), start).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
