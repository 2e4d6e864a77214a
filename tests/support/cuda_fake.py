"""Scripted stand-ins for CUDA: events that are held back or fail, registration that is refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class FakeDevice:
    """``CopyDevice`` on the CPU: copies happen at once, events pass while ``held`` is False."""

    def __init__(self) -> None:
        self.held = False
        self.fail_issue = False
        self.fail_record = False
        self.fail_event = False

    @contextmanager
    def issuing(self, kind: object) -> Iterator[None]:
        if self.fail_issue:
            raise RuntimeError("CUDA error: out of memory (scripted)")
        yield

    def record(self, kind: object) -> object:
        if self.fail_record:
            raise RuntimeError("CUDA error: context is destroyed (scripted)")
        return object()

    def is_done(self, event: object) -> bool:
        if self.fail_event:
            raise RuntimeError("CUDA error: an illegal memory access (scripted)")
        return not self.held


class FakeRegistrar:
    """``HostRegistrar`` that refuses the ``fail_at``-th piece (from 1), with a sticky error."""

    CODE = 2

    def __init__(self, fail_at: int = 0) -> None:
        self.fail_at = fail_at
        self.calls: list[tuple[int, int]] = []
        self.registered: dict[int, int] = {}
        self.sticky = 0

    def register(self, address: int, size_bytes: int) -> int:
        self.calls.append((address, size_bytes))
        if len(self.calls) == self.fail_at:
            self.sticky = self.CODE
            return self.CODE
        self.registered[address] = size_bytes
        return 0

    def unregister(self, address: int) -> int:
        if self.registered.pop(address, None) is None:
            self.sticky = 713
            return 713
        return 0

    def last_error(self) -> int:
        code, self.sticky = self.sticky, 0
        return code
