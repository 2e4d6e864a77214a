"""What blocks hold, for events: token ids and the key of the block before, as commits told them.

Routers find a prompt's blocks by their tokens. An engine knows those of its own run only; the
daemon keeps them for all engines, and for the next run. They are hints: what is lost here costs a
router's hit, never a block.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from kvhearth.worker_thread import SupervisedThread
from kvhearth_server.observability.counters import Counters
from kvhearth_server.observability.logs import get_logger
from kvhearth_server.ownership import check_own
from kvhearth_server.tiers.base import TOKENS_NAME

_FORMAT = 1
_PAGE_BYTES = 4096
_SET_UP = f"""
    PRAGMA page_size = {_PAGE_BYTES};
    PRAGMA locking_mode = EXCLUSIVE;
    PRAGMA journal_mode = WAL;
    PRAGMA synchronous = OFF; -- a power cut may cost hints, a flush would cost a drive's time
    PRAGMA cache_size = -8192;
    PRAGMA journal_size_limit = 0;
    PRAGMA user_version = {_FORMAT};
    CREATE TABLE IF NOT EXISTS places (
        id INTEGER PRIMARY KEY, namespace BLOB NOT NULL, kv_group INTEGER NOT NULL,
        UNIQUE (namespace, kv_group)
    );
    CREATE TABLE IF NOT EXISTS blocks (
        place INTEGER NOT NULL, key BLOB NOT NULL, parent BLOB NOT NULL, tokens BLOB NOT NULL,
        PRIMARY KEY (place, key)
    ) WITHOUT ROWID;
"""
WAITING_MAX = 1 << 16
"""Blocks waiting for the thread beyond which no more are kept or read, each of some 250 bytes."""
ANSWER_S = 1.0
"""Longest wait of an answer for what blocks hold."""
EXAMINED_MAX = 512
"""Blocks that are looked for at once: about a millisecond of the loop."""
_ALL = 1 << 62
"""More blocks than there are."""
_TICK_S = 0.25
_STOP_S = 1.0
_TELL_AGAIN_S = 60.0
_log = get_logger("kvhearth.engine")

T = TypeVar("T")


class Place(NamedTuple):
    """A KV group of a namespace, by the namespace's digest."""

    namespace: bytes
    kv_group: int


Block = tuple[bytes, bytes, bytes]
"""Key of a block, that of the block before it, and its tokens as they travel."""
_Name = tuple[int, bytes]
"""Number of a block's place in the file, and its key."""
_START: _Name = (0, b"")


class TokenStore:
    """Tokens of blocks in a file that a thread reads and writes.

    Args:
        folder: directory for the file; if there is none, or it cannot have the file, it is in
            memory.
        bytes_max: most bytes of the file and its log, 0 to keep nothing. What does not fit is
            lost.
        counters: counts blocks whose tokens were lost.
    """

    def __init__(self, folder: Path | None, bytes_max: int, counters: Counters) -> None:
        self._path = None if folder is None else folder / TOKENS_NAME
        self._pages_max = bytes_max // _PAGE_BYTES * 3 // 4  # the rest is for the log
        self._counters = counters
        self._jobs: deque[tuple[Callable[[], None], int]] = deque()
        """What the thread has to do, and for how many blocks."""
        self._waiting = 0
        self._started = False
        self._worker = SupervisedThread("kvhearth-tokens", self._step)
        self._due, self._examined = 0, _START
        """Number of blocks to examine, and the last one that was examined."""
        self._more = asyncio.Event()
        self._base: sqlite3.Connection | None = None
        self._told_at = -_TELL_AGAIN_S

    def keep(self, place: Place, blocks: Sequence[Block]) -> None:
        """Keep what blocks hold; returns at once."""
        if not self._pages_max:
            return
        self._ask(self._keep, place, blocks, count=len(blocks))
        self._examine(2 * len(blocks))

    async def find(self, place: Place, keys: Sequence[bytes]) -> list[Block]:
        """Return what blocks hold, as far as it is known and the file answers in time."""
        if not self._pages_max:
            return []
        try:
            found = asyncio.wrap_future(self._ask(self._find, place, keys, count=len(keys)))
            return await asyncio.wait_for(found, ANSWER_S) or []
        except TimeoutError:
            self._counters.add("block_tokens_lost", len(keys))
            return []

    def sweep(self) -> None:
        """Forget soon what all blocks held that are nowhere any more."""
        self._examined = _START
        self._examine(_ALL)

    async def run(self, gone: Callable[[Place, list[bytes]], list[bytes]]) -> None:
        """Forget what blocks held that are nowhere any more. For each block that is kept two are
        examined.

        Args:
            gone: returns those of some blocks.
        """
        while True:
            if self._due < EXAMINED_MAX:
                self._more.clear()
                await self._more.wait()
                continue
            after, found = self._examined, self._ask(self._next, self._examined)
            rows = await asyncio.wrap_future(found) or []
            if after == self._examined:  # nobody has asked for a sweep meanwhile
                self._due = self._due - len(rows) if rows else 0
                self._examined = rows[-1][0] if rows else _START
            for place in {place for _, place in rows}:
                names = {name[1]: name for name, each in rows if each == place}
                if old := [names[key] for key in gone(place, list(names))]:
                    await asyncio.wrap_future(self._ask(self._forget, old))

    def close(self) -> None:
        """Write what is to be kept, and end the thread; one whose drive hangs is left behind."""
        if self._started:
            with contextlib.suppress(TimeoutError):
                self._ask(self._close).result(_STOP_S)
            self._worker.stop(_STOP_S)

    def _examine(self, count: int) -> None:
        if self._pages_max:
            self._due += count
            self._more.set()

    def _ask(self, work: Callable[..., T], *args: Any, count: int = 0) -> Future[T | None]:
        """Have the thread do something for ``count`` blocks. If that fails, or it has too much to
        do, they are lost, and the result is None.
        """
        future = Future[T | None]()

        def job() -> None:
            result = None
            try:
                result = work(*args)
            except (OSError, sqlite3.Error) as error:
                self._failed(error, count)
            finally:
                if future.set_running_or_notify_cancel():
                    future.set_result(result)

        with self._worker.changed:
            full = count and self._waiting + count > WAITING_MAX
            if not full:
                self._jobs.append((job, count))
                self._waiting += count
                self._worker.changed.notify_all()
        if full:
            self._counters.add("block_tokens_lost", count)
            future.set_result(None)
        if not self._started:
            self._started = True
            self._worker.start()
        return future

    # -- the thread --------------------------------------------------------------------------------

    def _step(self) -> None:
        changed = self._worker.changed
        with changed:
            changed.wait_for(lambda: self._jobs or self._worker.stopping, _TICK_S)
            if not self._jobs:
                return
            job, count = self._jobs.popleft()
            self._waiting -= count
        job()

    def _keep(self, place: Place, blocks: Sequence[Block]) -> None:
        with self._open() as base:
            base.execute("INSERT OR IGNORE INTO places(namespace, kv_group) VALUES (?, ?)", place)
        number, most = _number(base, place), _log_pages(self._pages_max)
        for start in range(0, len(blocks), most):
            with base:
                base.executemany(
                    "INSERT OR REPLACE INTO blocks(place, key, parent, tokens) VALUES (?, ?, ?, ?)",
                    ((number, *block) for block in blocks[start : start + most]),
                )

    def _find(self, place: Place, keys: Sequence[bytes]) -> list[Block]:
        base = self._open()
        number, found = _number(base, place), list[Block]()
        for key in keys if number else ():
            row = base.execute(
                "SELECT key, parent, tokens FROM blocks WHERE place = ? AND key = ?", (number, key)
            ).fetchone()
            found += [row] if row else []
        return found

    def _next(self, after: _Name) -> list[tuple[_Name, Place]]:
        """Return the next blocks in the file's order, with their places."""
        rows = self._open().execute(
            "SELECT place, key, namespace, kv_group FROM blocks JOIN places ON id = place "
            "WHERE (place, key) > (?, ?) ORDER BY place, key LIMIT ?",
            (*after, EXAMINED_MAX),
        )
        return [((number, key), Place(namespace, group)) for number, key, namespace, group in rows]

    def _forget(self, names: Sequence[_Name]) -> None:
        with self._open() as base:
            base.executemany("DELETE FROM blocks WHERE (place, key) = (?, ?)", names)

    def _open(self) -> sqlite3.Connection:
        """Return the open file, or one in memory if the directory cannot have it."""
        if self._base is None and self._path is not None:
            try:
                self._base = _opened(self._path, self._pages_max)
            except (OSError, sqlite3.Error) as error:
                self._tell(error, path=str(self._path))
                if _damaged(error):
                    _remove(self._path)
                    self._base = _opened(self._path, self._pages_max)
        if self._base is None:
            self._path = None
            self._base = _set_up(sqlite3.connect(":memory:"), self._pages_max)
        return self._base

    def _failed(self, error: OSError | sqlite3.Error, lost: int) -> None:
        self._counters.add("block_tokens_lost", lost)
        self._tell(error, blocks=lost)
        if _damaged(error) and self._path is not None:
            self._close()
            _remove(self._path)

    def _tell(self, error: OSError | sqlite3.Error, **fields: object) -> None:
        """Log a failure, once a minute."""
        now = time.monotonic()
        if now - self._told_at >= _TELL_AGAIN_S:
            self._told_at = now
            _log.warning("block_tokens.failed", error=str(error), **fields)

    def _close(self) -> None:
        base, self._base = self._base, None
        if base is not None:
            base.close()


def _number(base: sqlite3.Connection, place: Place) -> int:
    """Return the number of a KV group of a namespace, 0 if nothing of it is kept."""
    found = base.execute("SELECT id FROM places WHERE (namespace, kv_group) = (?, ?)", place)
    return int((found.fetchone() or (0,))[0])


def _log_pages(pages_max: int) -> int:
    """Return the pages of the log beyond which it is written into the file. A change of as many
    blocks changes about as many pages.
    """
    return max(1, min(512, pages_max // 8))


def _opened(path: Path, pages_max: int) -> sqlite3.Connection:
    """Open a file, or make it.

    Raises:
        OSError, sqlite3.Error: it cannot be.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        check_own(descriptor, path)
    finally:
        os.close(descriptor)
    return _set_up(sqlite3.connect(path, timeout=0), pages_max)


def _set_up(base: sqlite3.Connection, pages_max: int) -> sqlite3.Connection:
    """Prepare an open file, which is closed if it cannot be.

    Raises:
        sqlite3.Error: it cannot be.
    """
    try:
        (made_by,) = base.execute("PRAGMA user_version").fetchone()
        if made_by not in (0, _FORMAT):
            raise sqlite3.DatabaseError(f"its format is {made_by}, not {_FORMAT}")
        base.executescript(_SET_UP)
        base.execute(f"PRAGMA max_page_count = {pages_max}")
        base.execute(f"PRAGMA wal_autocheckpoint = {_log_pages(pages_max)}")
    except sqlite3.Error:
        base.close()
        raise
    return base


def _damaged(error: OSError | sqlite3.Error) -> bool:
    """Whether a file must be made anew."""
    return type(error) is sqlite3.DatabaseError


def _remove(path: Path) -> None:
    for suffix in ("", "-wal", "-journal"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)
