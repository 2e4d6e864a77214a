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
from typing import Any

from kvhearth import failpoints as faults
from kvhearth_lab.harness.client_process import end_with
from kvhearth_lab.harness.engine import PAGES, Clock, Engine, Seen, contract_of
from kvhearth_lab.torture.piping import Pipes
from kvhearth_lab.torture.stalls import Metronome

_BEAT_S = 0.25
_RETRY_S = 0.01
_PORTION = 16
_PROMOTION_S = 2.0
_SUSPECTS_S = 8.0
"""Time for blocks that need not be there; the required blocks have their whole time after it."""
_KEEP_NUMBERS = 4000
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


class Worker:
    """One engine and the commands that it obeys."""

    def __init__(self, mouth: Mouth, start: Line) -> None:
        self._say = mouth.say
        self._dice = random.Random(start["seed"])
        self._clock = Clock()
        contract = contract_of(start["model"], start["page_bytes"], start["shards"])
        self._engine = Engine(
            start["url"], contract, start["engine_id"], start["model"], self._clock
        )
        self._pipes = Pipes(self._engine) if start["pipes"] else None
        self._known: list[int] = []
        self._again: list[int] = []
        """Blocks of older weights that are stored again, as the same prompts return."""
        self._next = int(start["first"])
        self._stores_left = 0
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
        engine, dice = self._engine, self._dice
        if not engine.ready:
            # The daemon is away: miss at once, then pause.
            self._note(engine.check(self._some(4), prefetch=False))
            engine.client.wait_ready(0.02)
            time.sleep(0.005)
        elif (choice := dice.random()) < 0.5:
            self._store()
        elif choice < 0.8:
            self._note(self._load(dice.randint(1, 24)))
        elif choice < 0.9:
            taken = engine.client.reserve({0: dice.randint(1, 6)})
            if dice.random() < 0.7:
                engine.client.abort(
                    taken.groups, boot_id=taken.boot_id, in_doubt=dice.random() < 0.5
                )
        elif choice < 0.94:
            engine.client.pin({0: engine.keys(self._some(4))}, 0.3)
        elif choice < 0.97:
            engine.client.prefetch({0: engine.keys(self._some(16))})
        else:
            # Take a lease that only the session's end releases, and a promotion without a waiter.
            engine.client.lookup({0: engine.keys(self._some(3))}, prefetch=True)
        self._tell()

    def _store(self) -> None:
        dice, engine = self._dice, self._engine
        count = min(dice.randint(1, 12), self._stores_left)
        numbers, self._again = self._again[:count], self._again[count:]
        fresh = count - len(numbers)
        numbers += range(self._next, self._next + fresh)
        self._next += fresh
        self._stores_left -= count
        if not count or dice.random() < 0.2:
            numbers += self._some(dice.randint(1, 4))
        numbers = list(dict.fromkeys(numbers))
        epoch = engine.epoch
        if epoch < 0 or not numbers:
            return
        parent = self._some(1)
        self._say(tried=numbers, epoch=epoch)
        if self._pipes is not None and dice.random() < 0.5:
            bound, reason = self._pipes.store(numbers, parent[0] if parent else -1)
        else:
            bound, reason = engine.store(
                numbers, sums=dice.random() < 0.7, parent=parent[0] if parent else -1
            )
        if reason:
            self._clock.counts[f"store_not: {reason}"] += 1
        if bound and epoch == engine.epoch:
            self._say(bound=bound, epoch=epoch)
            self._known = (self._known + bound)[-_KEEP_NUMBERS:]

    def _load(self, count: int) -> Seen:
        if self._pipes is not None and self._dice.random() < 0.5:
            return self._pipes.load(self._some(count))
        return self._engine.check(self._some(count), prefetch=True)

    def _some(self, count: int) -> list[int]:
        numbers = self._known or [self._next]
        return self._dice.sample(numbers, min(count, len(numbers)))

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

    def _check(self, command: Line) -> Line:
        """Compare blocks until all were right or the time is over, a few at a time: more than
        memory has room for cannot be promoted together. Suspects need not be there.
        """
        engine, end = self._engine, time.monotonic() + command["deadline_s"]
        left = list(command["numbers"])
        if not engine.wait_ready(command["deadline_s"]):
            return {"ready": False, "refusal": str(engine.client.refusal), "left": left}
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
        """Shut down connections to the daemon while they are in use: ``what`` is life or calls."""
        name = {"life": "attach.sock", "calls": "calls.sock"}[command["what"]]
        cut = 0
        for number in _descriptors():
            try:
                with socket.socket(fileno=os.dup(number)) as one:
                    if str(one.getpeername()).endswith(name):
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

    def _bump(self, _: Line) -> Line:
        self._again = self._known[-PAGES:]
        return {"epoch": self._engine.client.bump_epoch()}

    def _end(self, command: Line | None) -> int:
        pipes_closed = self._pipes is None or self._pipes.close()
        closed = self._engine.close() and pipes_closed
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
