"""Disk queue over io_uring's raw system calls.

PyPI's ``liburing`` is not used: its wait holds the interpreter lock. Nothing waits in this module:
the ring signals an eventfd, and every system call releases the lock. No buffers are registered,
because that would need a memlock limit that daemons seldom have.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import struct
import threading
from collections.abc import Sequence

from kvhearth_server.tiers.ssd.disk.base import PIECES_MAX, Op, Reaped, Request
from kvhearth_server.tiers.ssd.disk.syscalls import (
    IO_URING_ENTER,
    IO_URING_REGISTER,
    IO_URING_SETUP,
    make_event,
    put_vectors,
    reset_event,
    system_call,
)

_OFF_SQES = 0x10000000
_FEAT_SINGLE_MMAP = 1
_REGISTER_EVENTFD = 4
_FSYNC_DATASYNC = 1
_OPCODES = {Op.READ: (22, 1), Op.WRITE: (23, 2), Op.SYNC: (3, 3)}
"""Opcodes for one piece and for several."""

_PARAMS_BYTES = 120
_SQE = struct.Struct("<BBHiQQIIQHHiQQ")
_CQE = struct.Struct("<QiI")
_LATER = frozenset({errno.EAGAIN, errno.EBUSY, errno.EINTR})


class UringQueue:
    """A ring of ``depth`` requests."""

    name = "io_uring"

    def __init__(self, depth: int) -> None:
        """Raises:
        OSError: EPERM or ENOSYS where it is not allowed, ENOMEM beyond the memlock limit.
        """
        params = (ctypes.c_uint32 * (_PARAMS_BYTES // 4))()
        self._ring_fd = system_call(IO_URING_SETUP, depth, ctypes.addressof(params))
        self.event_fd = make_event()
        self._ring: mmap.mmap | None = None
        try:
            self._map(params)
            event = ctypes.c_int(self.event_fd)
            where = ctypes.addressof(event)
            system_call(IO_URING_REGISTER, self._ring_fd, _REGISTER_EVENTFD, where, 1)
        except OSError:
            self.close()
            raise
        self.depth = depth
        self._free = list(range(depth - 1, -1, -1))
        self._tags = [0] * depth
        self._vectors = (ctypes.c_uint64 * (depth * PIECES_MAX * 2))()
        self._vectors_at = ctypes.addressof(self._vectors)
        self._unentered = 0
        self._fence = threading.Lock()

    def _map(self, params: ctypes.Array[ctypes.c_uint32]) -> None:
        if not params[5] & _FEAT_SINGLE_MMAP:
            raise OSError(errno.ENOSYS, "io_uring of a kernel before 5.4")
        entries, completions = params[0], params[1]
        sq, cq = params[10:20], params[20:30]
        size = max(sq[6] + entries * 4, cq[5] + completions * _CQE.size)
        self._ring = mmap.mmap(self._ring_fd, size, mmap.MAP_SHARED, 3)
        sqes = entries * _SQE.size
        self._sqes = mmap.mmap(self._ring_fd, sqes, mmap.MAP_SHARED, 3, offset=_OFF_SQES)
        self._words = memoryview(self._ring)[: size // 4 * 4].cast("I")
        self._sq_tail, self._sq_mask = sq[1] // 4, self._words[sq[2] // 4]
        self._cq_head, self._cq_tail = cq[0] // 4, cq[1] // 4
        self._cq_mask, self._cqes = self._words[cq[2] // 4], cq[5]
        for index in range(entries):
            self._words[sq[6] // 4 + index] = index

    @property
    def in_flight(self) -> int:
        return self.depth - len(self._free)

    def submit(self, requests: Sequence[Request]) -> int:
        taken = 0
        for request in requests:
            if not self._free:
                break
            self._push(request)
            taken += 1
        self._enter()
        return taken

    def _push(self, request: Request) -> None:
        slot = self._free.pop()
        self._tags[slot] = request.tag
        single, vectored = _OPCODES[request.op]
        flags = 0
        if request.op is Op.SYNC:
            opcode, address, length, flags = single, 0, 0, _FSYNC_DATASYNC
        elif len(request.pieces) == 1:
            opcode, (address, length) = single, request.pieces[0]
        else:
            length = len(request.pieces)
            put_vectors(self._vectors, slot, request.pieces)
            opcode, address = vectored, self._vectors_at + slot * PIECES_MAX * 16
        tail = self._words[self._sq_tail]
        place = (tail & self._sq_mask) * _SQE.size
        fields = (opcode, 0, 0, request.fd, request.offset, address, length, flags, slot)
        _SQE.pack_into(self._sqes, place, *fields, 0, 0, 0, 0, 0)
        self._words[self._sq_tail] = (tail + 1) & 0xFFFF_FFFF
        self._unentered += 1

    def _enter(self) -> None:
        while self._unentered:
            try:
                self._unentered -= system_call(
                    IO_URING_ENTER, self._ring_fd, self._unentered, 0, 0, 0, 0
                )
            except OSError as error:
                if error.errno in _LATER:
                    return  # they stay in the ring; the next call enters them
                raise

    def reap(self) -> list[Reaped]:
        reset_event(self.event_fd)
        if self._unentered:
            self._enter()
        ring = self._ring
        if ring is None:
            return []
        head, tail = self._words[self._cq_head], self._words[self._cq_tail]
        with self._fence:  # the entries are read after the tail, also on weakly ordered processors
            done = []
        while head != tail:
            place = self._cqes + (head & self._cq_mask) * _CQE.size
            slot, result, _ = _CQE.unpack_from(ring, place)
            done.append(Reaped(self._tags[slot], result))
            self._free.append(slot)
            head = (head + 1) & 0xFFFF_FFFF
        self._words[self._cq_head] = head
        return done

    def close(self) -> None:
        if self._ring_fd < 0:
            return
        if self._ring is not None:
            self._words.release()
            self._ring.close()
            self._sqes.close()
            self._ring = None
        os.close(self._ring_fd)
        os.close(self.event_fd)
        self._ring_fd = -1
