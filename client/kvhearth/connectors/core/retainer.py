"""Keeps the blocks of ended requests from eviction for a while: KV that survives a tool call."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvhearth.client import KVClient
from kvhearth.connectors.core.engine import Counters
from kvhearth.results import Pin
from kvhearth.worker_thread import SupervisedThread

QUEUE_MAX = 256
"""Most requests whose blocks wait to be kept; those of further ones are not kept."""
STORED_S = 10.0
"""Longest wait for a request's stores; what is stored then is kept."""
_LOOK_S, _TICK_S = 0.05, 1.0

Keys = Mapping[int, Sequence[bytes]]
"""Keys by KV group, from a request's first block on."""


@dataclass(frozen=True)
class _Branch:
    """A place in a dialogue, told by the key of its last block and of its prompt's last block."""

    group: int
    blocks: int
    last: bytes
    prompt_blocks: int
    prompt_last: bytes

    @classmethod
    def of(cls, keys: Keys, prompt_blocks: Mapping[int, int]) -> _Branch:
        """The place after these blocks, of which the prompt filled so many of each group."""
        group = max(keys, key=lambda each: len(keys[each]), default=0)
        named = keys.get(group, ())
        prompt = min(prompt_blocks.get(group, 0), len(named))
        last = named[-1] if named else b""
        return cls(group, len(named), last, prompt, named[prompt - 1] if prompt else b"")

    def is_in(self, keys: Keys) -> bool:
        """Whether a request with these blocks begins with all of this one's."""
        return self._at(keys, self.blocks) == self.last

    def has_prompt_in(self, keys: Keys) -> bool:
        """Whether it begins with all blocks of this one's prompt: a chat's template may write an
        answer otherwise, the next time.
        """
        return self.prompt_blocks > 0 and self._at(keys, self.prompt_blocks) == self.prompt_last

    def _at(self, keys: Keys, blocks: int) -> bytes:
        named = keys.get(self.group, ())
        return named[blocks - 1] if 0 < blocks <= len(named) else b""


@dataclass(frozen=True, eq=False)
class _Wish:
    """Blocks to keep for ``seconds``, once they are stored."""

    session_id: str
    branch: _Branch
    keys: Keys
    seconds: float
    until: float


@dataclass(frozen=True, eq=False)
class _Kept:
    """A pin, and when it ends."""

    session_id: str
    branch: _Branch
    pin: Pin
    ends_at: float


class Retainer:
    """Pins the blocks of a session's last request until its next one, on a thread. Parallel
    branches of a session have a pin each, which the next request of that branch ends.

    A wish: what the daemon refuses is counted, and nothing waits for it.

    Args:
        client: the scheduler's client.
        counters: the connector's.
        storing: tells whether some of these blocks are still being stored.
    """

    def __init__(
        self, client: KVClient, counters: Counters, storing: Callable[[Keys], bool]
    ) -> None:
        self._client, self._counters, self._storing = client, counters, storing
        self._wishes = deque[_Wish]()
        self._kept: list[_Kept] = []
        self._over: list[Pin] = []
        """Pins to end."""
        self._worker = SupervisedThread(
            "kvhearth-retain", self._step, self._recover, clock=client.clock
        )
        self._changed = self._worker.changed
        self._worker.start()

    def retain(
        self,
        session_id: str,
        keys: Keys,
        seconds: float,
        prompt_blocks: Mapping[int, int] | None = None,
    ) -> None:
        """Keep blocks, in place of those that were kept for the same branch before.

        Args:
            prompt_blocks: by KV group, how many of the blocks the request's prompt filled.
        """
        branch = _Branch.of(keys, prompt_blocks or {})
        until = self._client.clock.now() + STORED_S
        with self._changed:
            if len(self._wishes) < QUEUE_MAX:
                self._wishes.append(_Wish(session_id, branch, keys, seconds, until))
                self._changed.notify()
                return
        self._counters.add("retain_refused", sum(map(len, keys.values())))

    def resume(self, session_id: str, find_keys: Callable[[], Keys] | None = None) -> None:
        """End what is kept, or waits to be, for a session that goes on: its request holds the
        blocks itself.

        Args:
            find_keys: returns the request's blocks, which tell the branch; None for all branches.
        """
        now = self._client.clock.now()
        with self._changed:
            self._kept = [each for each in self._kept if each.ends_at > now]
            own: list[_Wish | _Kept] = [*self._kept, *self._wishes]
            own = [each for each in own if each.session_id == session_id]
            if not own:
                return
            if find_keys is not None:
                own = _continued(own, find_keys())
            self._end(own)
            if own:
                self._counters.add("retain_resumed", len(own))
                self._changed.notify()

    def close(self, deadline_s: float) -> bool:
        """Stop the thread; pins stay until they expire. False if that took too long."""
        return self._worker.stop(deadline_s)

    def _end(self, own: Sequence[_Wish | _Kept]) -> None:
        """Drop wishes, and have pins ended; under the lock."""
        for each in own:
            if isinstance(each, _Wish):
                self._wishes.remove(each)
            else:
                self._kept.remove(each)
                self._over.append(each.pin)

    def _step(self) -> None:
        now = self._client.clock.now()
        with self._changed:
            wishes = list(self._wishes)
        for wish in wishes:
            if now >= wish.until or not self._storing(wish.keys):
                self._grant(wish, now)
        with self._changed:
            over, self._over = self._over, []
        for pin in over:
            self._client.unpin(pin)
        with self._changed:
            wake_s = _LOOK_S if self._wishes else _TICK_S
            seen = len(self._wishes)
            self._client.clock.wait_for(
                self._changed,
                lambda: len(self._wishes) > seen or bool(self._over) or self._worker.stopping,
                wake_s,
            )

    def _grant(self, wish: _Wish, now: float) -> None:
        """Pin a wish's blocks. If it has ended meanwhile, the pin does, too."""
        pin = self._client.pin(wish.keys, wish.seconds, wish.session_id)
        asked = sum(map(len, wish.keys.values()))
        kept = sum(int(flags.sum()) for flags in pin.pinned.values())
        self._counters.add_all({"retained_blocks": kept, "retain_refused": asked - kept})
        with self._changed:
            if wish not in self._wishes:
                self._over.append(pin)
                return
            self._wishes.remove(wish)
            before = [each for each in self._kept if each.session_id == wish.session_id]
            self._end([each for each in before if each.branch.is_in(wish.keys)])
            if not pin.reason:
                ends_at = now + wish.seconds
                self._kept.append(_Kept(wish.session_id, wish.branch, pin, ends_at))

    def _recover(self) -> None:
        self._client.count("retain_crashes")


def _continued(own: Sequence[_Wish | _Kept], keys: Keys) -> list[_Wish | _Kept]:
    """What a request with these blocks continues: all branches that it begins with, else the last
    one with whose prompt it begins.
    """
    whole = [each for each in own if each.branch.is_in(keys)]
    return whole or [each for each in own if each.branch.has_prompt_in(keys)][-1:]
