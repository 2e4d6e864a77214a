"""A thread a directory for calls to the file system that may wait: making and removing files."""

from __future__ import annotations

import errno
import queue
import threading
from collections import deque
from collections.abc import Callable

from kvhearth_server.tiers.ssd.directory import Directory, Segment
from kvhearth_server.tiers.ssd.disk.kernel import signal_event
from kvhearth_server.tiers.ssd.files import Busy

Result = Segment | OSError | None
_Task = tuple[Callable[[], Result], Callable[[Result], None]]


class Janitor:
    """One task at a time; its result is taken by the loop."""

    def __init__(self, directory: Directory, event_fd: int) -> None:
        self._event_fd = event_fd
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._ended: deque[tuple[Callable[[Result], None], Result]] = deque()
        self._pending = 0
        name = f"kvhearth-files-{directory.path.name}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def busy(self) -> bool:
        """Whether a task has not been handed over yet."""
        return self._pending > 0

    def start(self, task: Callable[[], Result], then: Callable[[Result], None]) -> None:
        """Run ``task`` on the thread, then ``then`` with its result on the loop, by ``poll``.

        What is raised as ``OSError`` or ``Busy`` is the result.
        """
        self._pending += 1
        self._tasks.put((task, then))

    def poll(self) -> None:
        """Hand over what has ended."""
        while self._ended:
            then, result = self._ended.popleft()
            self._pending -= 1
            then(result)

    def stop(self, deadline_s: float) -> bool:
        """End the thread; false if a call of the file system does not return."""
        self._tasks.put(None)
        self._thread.join(deadline_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (job := self._tasks.get()) is not None:
            task, then = job
            result: Result
            try:
                result = task()
            except OSError as error:
                result = error
            except Busy as error:
                result = BlockingIOError(errno.EAGAIN, str(error))
            self._ended.append((then, result))
            signal_event(self._event_fd)
