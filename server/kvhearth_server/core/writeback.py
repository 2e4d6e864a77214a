"""Write-back of blocks to a slower tier; blocks being written are held as by a reader."""

from __future__ import annotations

import numpy as np

from kvhearth.model import I64, U32, Bools
from kvhearth_server.core.holds import hold, hold_room, unhold
from kvhearth_server.core.lower_tier import BlockBatch
from kvhearth_server.core.namespaces import Namespace
from kvhearth_server.core.removal import Cause, remove_blocks, tell_gone
from kvhearth_server.core.slot_table import CopyState
from kvhearth_server.core.state import CoreState


class Copies:
    """Batches of blocks that are being copied to another tier; their slots are held as by a reader.

    Blocks of a batch are of one namespace, its current epoch, and one KV group.
    """

    def __init__(self, state: CoreState) -> None:
        self._state = state
        self._batches: list[BlockBatch] = []

    @property
    def payload_bytes(self) -> int:
        """Bytes being copied."""
        return sum(batch.payload_bytes for batch in self._batches)

    def held(self, segment: int) -> list[I64]:
        """The slots that are being copied."""
        return [each.slots.reshape(-1) for each in self._batches if each.segment == segment]

    def _room(
        self, heads: I64, bytes_max: int, *, blocks_max: int = 1 << 32, slots_max: int = 1 << 32
    ) -> int:
        """Number of blocks at the begin of ``heads`` that are of one kind and may be held now."""
        state, table = self._state, self._state.table
        kinds = table.kinds(heads)
        alike = kinds == kinds[0]
        count = len(heads) if alike.all() else int(alike.argmin())
        namespace, kv_group = self._kind(heads)
        spec, segment = namespace.contract.groups[kv_group], state.segment_of[namespace.tenant]
        block = state.slot_bytes(spec) * spec.shards
        room = max(bytes_max, 0 if self._batches else block)
        room = min(room, hold_room(state, segment))
        leases = state.limits.leased_slots_max - state.books[segment].leased_slots
        most = min(blocks_max, max(1, slots_max // spec.shards))
        return max(0, min(count, most, room // block, leases // spec.shards))

    def _kind(self, heads: I64) -> tuple[Namespace, int]:
        """Namespace and KV group of the first block."""
        table, head = self._state.table, heads.item(0)
        return self._state.namespaces.get(table.namespace.item(head)), table.group.item(head)

    def _hold(
        self, heads: I64, parent_keys: list[bytes] | None = None, *, renew: bool = False
    ) -> BlockBatch:
        """Hold the slots of blocks of one kind, for which there is room, as a batch."""
        state, table = self._state, self._state.table
        namespace, kv_group = self._kind(heads)
        spec, segment = namespace.contract.groups[kv_group], state.segment_of[namespace.tenant]
        slots = table.all_shards(heads, spec.shards)
        hold(state, segment, slots.reshape(-1))
        links = table.parent[heads].astype(np.int64) - 1
        batch = BlockBatch(
            namespace,
            kv_group,
            spec,
            segment,
            namespace.epoch,
            state.index.keys(heads),
            slots,
            table.generation[heads].copy(),
            table.checksum[slots],
            table.sequence[heads],
            np.where(links >= 0, table.sequence[np.maximum(links, 0)], np.uint64(0)),
            parent_keys or [],
            renew,
        )
        self._batches.append(batch)
        return batch

    def _end(self, batch: BlockBatch) -> Bools:
        """Release a batch's slots; returns which blocks still live, (n,)."""
        alive = self._state.table.generation[batch.slots[:, 0]] == batch.generations
        self._batches.remove(batch)
        unhold(self._state, batch.segment, batch.slots.reshape(-1))
        return np.asarray(alive)

    def _remove_wrong(self, heads: I64, found_by: str) -> None:
        """Remove blocks whose bytes in memory do not match their checksums."""
        if len(heads):
            self._state.count("checksum_failures", len(heads), found_by)
            remove_blocks(self._state, heads, Cause.CHECKSUM)


class Writeback(Copies):
    """Batches that are being written back."""

    def writes(self, namespace: Namespace) -> bool:
        """Whether blocks of a namespace are being written."""
        return any(batch.namespace is namespace for batch in self._batches)

    def begin(self, slots_max: int, bytes_max: int) -> BlockBatch | None:
        """Take the longest-waiting blocks of one kind and hold them until ``resolve``.

        Returns None if nothing waits, or nothing more may be held now. The segments take turns: a
        segment that may hold nothing more does not block the others.

        Args:
            slots_max, bytes_max: bounds; one block is always taken while no other is being written.
        """
        for segment in self._state.writeback_queue.segments():
            batch = self._begin(segment, slots_max, bytes_max)
            if batch is not None:
                self._state.writeback_queue.served(segment)
                return batch
        return None

    def _begin(self, segment: int, slots_max: int, bytes_max: int) -> BlockBatch | None:
        heads, generations = self._next(segment)
        if not len(heads):
            return None
        count = self._room(heads, bytes_max, slots_max=slots_max)
        self._state.writeback_queue.put_back(heads[count:], generations[count:])
        if not count:
            return None
        self._state.table.copy_state[heads[:count]] = CopyState.WRITING
        return self._hold(heads[:count])

    def _next(self, segment: int) -> tuple[I64, U32]:
        """Take blocks of a segment that wait and are worth writing; none if no more wait."""
        while (taken := self._state.writeback_queue.take(segment)) is not None:
            heads, generations = self._current(*taken)
            if len(heads):
                return heads, generations
        return np.zeros(0, np.int64), np.zeros(0, np.uint32)

    def _current(self, heads: I64, generations: U32) -> tuple[I64, U32]:
        """Keep blocks of the current epoch; others are never requested again."""
        table, namespaces = self._state.table, self._state.namespaces
        numbers = table.namespace[heads]
        current = np.ones(len(heads), np.bool_)
        for number in np.unique(numbers).tolist():
            mine = numbers == number
            current[mine] = table.epoch[heads[mine]] == namespaces.get(number).epoch
        table.copy_state[heads[~current]] = CopyState.REFUSED
        self._state.release_epoch += int(not current.all())
        return heads[current], generations[current]

    def retreat(self, batch: BlockBatch) -> None:
        """Queue a batch again that the tier did not accept now."""
        alive = self._end(batch)
        heads = batch.slots[alive, 0]
        self._state.writeback_queue.put_back(heads, self._state.table.generation[heads].copy())

    def resolve(
        self, batch: BlockBatch, *, saved: I64, refused: I64, wrong: I64, again: I64
    ) -> int:
        """Release a batch's slots from the tier and record the outcome by row.

        Blocks of ``wrong`` rows do not match their checksums and are removed; ``again`` rows are
        queued again. Returns the number of saved blocks.
        """
        state = self._state
        alive = self._end(batch)
        heads = batch.slots[:, 0]
        state.table.copy_state[heads[saved][alive[saved]]] = CopyState.SAVED
        state.table.copy_state[heads[refused][alive[refused]]] = CopyState.REFUSED
        late = heads[again][alive[again]]
        state.writeback_queue.put_back(late, state.table.generation[late].copy())
        self._remove_wrong(heads[wrong][alive[wrong]], "demotion")
        late_saved = [batch.keys[row] for row in saved[~alive[saved]].tolist()]
        tell_gone(state, batch.namespace, batch.kv_group, late_saved, "")
        state.count("demoted_blocks", len(saved))
        state.count("demoted_bytes", len(saved) * batch.block_bytes)
        return len(saved)

    def lost(self, namespace: Namespace, kv_group: int, keys: list[bytes]) -> Bools:
        """Record that the tier dropped these keys; returns which of them are in memory, (n,).

        Blocks in memory are offered again when their slots are wanted.
        """
        table = self._state.table
        heads = self._state.index.find(namespace.number, kv_group, keys)
        here = heads[heads >= 0]
        saved = here[table.copy_state[here] == CopyState.SAVED]
        table.copy_state[saved] = CopyState.NOT
        return np.asarray(heads >= 0)
