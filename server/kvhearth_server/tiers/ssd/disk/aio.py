"""Disk queue over libaio's system calls, which Docker's default seccomp profile allows."""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections import deque
from collections.abc import Sequence

from kvhearth_server.tiers.ssd.disk.base import PIECES_MAX, Op, Reaped, Request
from kvhearth_server.tiers.ssd.disk.syscalls import (
    aio_numbers,
    make_event,
    put_vectors,
    reset_event,
    signal_event,
    system_call,
)

_OPCODES = {Op.READ: (0, 7), Op.WRITE: (1, 8), Op.SYNC: (3, 3)}
"""Opcodes for one piece and for several."""

_RESULT_TO_EVENTFD = 1
_IOCB = struct.Struct("<QIIHhIQQqQII")
_EVENT = struct.Struct("<QQqq")


class AioQueue:
    """A context of ``depth`` requests. Closing it waits until the kernel has ended them all."""

    name = "libaio"

    def __init__(self, depth: int) -> None:
        """Raises:
        OSError: ENOSYS where it is not allowed, EAGAIN beyond ``fs.aio-max-nr``.
        """
        setup, self._destroy, self._getevents, self._submit = aio_numbers()
        context = ctypes.c_ulong(0)
        system_call(setup, depth, ctypes.addressof(context))
        self._context = int(context.value)
        self.event_fd = make_event()
        self.depth = depth
        self._free = list(range(depth - 1, -1, -1))
        self._tags = [0] * depth
        self._iocbs = (ctypes.c_char * (_IOCB.size * depth))()
        self._iocbs_at = ctypes.addressof(self._iocbs)
        self._pointers = (ctypes.c_uint64 * depth)()
        self._events = (ctypes.c_char * (_EVENT.size * depth))()
        self._no_time = (ctypes.c_long * 2)()
        self._vectors = (ctypes.c_uint64 * (depth * PIECES_MAX * 2))()
        self._vectors_at = ctypes.addressof(self._vectors)
        self._refused: deque[Reaped] = deque()

    @property
    def in_flight(self) -> int:
        return self.depth - len(self._free) + len(self._refused)

    def submit(self, requests: Sequence[Request]) -> int:
        offered = list(requests[: len(self._free)])
        slots = [self._fill(request) for request in offered]
        done = 0
        while done < len(slots):
            try:
                done += self._hand_over(slots[done:])
            except OSError as error:
                if error.errno in (errno.EAGAIN, errno.EINTR):
                    break
                if error.errno == errno.ENOSYS:
                    raise
                # The kernel examines one request after another: the first one is wrong.
                self._refused.append(Reaped(offered[done].tag, -(error.errno or errno.EIO)))
                self._free.append(slots[done])
                signal_event(self.event_fd)
                done += 1
        self._free.extend(slots[done:])
        return done

    def _fill(self, request: Request) -> int:
        slot = self._free.pop()
        self._tags[slot] = request.tag
        single, vectored = _OPCODES[request.op]
        if request.op is Op.SYNC:
            opcode, address, length = single, 0, 0
        elif len(request.pieces) == 1:
            opcode, (address, length) = single, request.pieces[0]
        else:
            length = len(request.pieces)
            put_vectors(self._vectors, slot, request.pieces)
            opcode, address = vectored, self._vectors_at + slot * PIECES_MAX * 16
        fields = (slot, 0, 0, opcode, 0, request.fd, address, length, request.offset, 0)
        _IOCB.pack_into(self._iocbs, slot * _IOCB.size, *fields, _RESULT_TO_EVENTFD, self.event_fd)
        return slot

    def _hand_over(self, slots: list[int]) -> int:
        for index, slot in enumerate(slots):
            self._pointers[index] = self._iocbs_at + slot * _IOCB.size
        where = ctypes.addressof(self._pointers)
        return system_call(self._submit, self._context, len(slots), where)

    def reap(self) -> list[Reaped]:
        reset_event(self.event_fd)
        done = list(self._refused)
        self._refused.clear()
        events, no_time = ctypes.addressof(self._events), ctypes.addressof(self._no_time)
        try:
            count = system_call(self._getevents, self._context, 0, self.depth, events, no_time)
        except InterruptedError:
            signal_event(self.event_fd)
            return done
        for index in range(count):
            slot, _, result, _ = _EVENT.unpack_from(self._events, index * _EVENT.size)
            done.append(Reaped(self._tags[slot], result))
            self._free.append(slot)
        return done

    def close(self) -> None:
        if self._context:
            system_call(self._destroy, self._context)
            self._context = 0
            os.close(self.event_fd)
