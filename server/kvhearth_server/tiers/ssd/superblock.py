"""The file that marks a directory as KVHearth's: opened, made, or restored from the segments."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from kvhearth.failpoints import hit
from kvhearth_server.ownership import foreign
from kvhearth_server.tiers.base import DirectoryError
from kvhearth_server.tiers.ssd.files import Busy, Files, OpenFile
from kvhearth_server.tiers.ssd.format import (
    PAGE_BYTES,
    RECORD_DTYPE,
    RECORD_MAGIC,
    DirectoryHead,
    Doubt,
    Footer,
    crc_good,
    directory_page,
    parse_directory_page,
    parse_footer_page,
    parse_segment_page,
)

SUPERBLOCK_NAME = "kvhearth.log"
_WITNESSES = 64
"""Number of segment files that suffice to decide."""


@dataclass
class Ownership:
    """A locked directory.

    Attributes:
        lock: the current file, or the directory itself where no file can be made.
        older: replaced files. Their locks are kept, because another daemon may have opened one
            just before.
        doubts: reasons for not believing the file.
        repairs: repairs that were made, for people.
    """

    lock: OpenFile
    head: DirectoryHead
    older: list[OpenFile] = field(default_factory=list)
    doubts: Counter[Doubt] = field(default_factory=Counter)
    repairs: list[str] = field(default_factory=list)

    def close(self) -> None:
        """Release the directory."""
        for each in (self.lock, *self.older):
            if each.fd >= 0:
                os.close(each.fd)
                each.fd = -1

    def rewrite(self, files: Files, path: Path, head: DirectoryHead) -> None:
        """Replace this file by another one.

        Raises:
            OSError: nothing has changed.
        """
        lock = _write(files, path, head, replace=True)
        self.older.append(self.lock)
        self.lock, self.head = lock, head


def own(files: Files, folder: Path, segments: list[Path], segment_bytes: int) -> Ownership:
    """Lock a directory and determine its log.

    Args:
        segments: its files, as witnesses if its own file cannot be believed.
        segment_bytes: segment size of a log that begins here.

    Raises:
        DirectoryError: another version wrote it, or it is not the daemon's alone.
        Busy: another daemon has it.
        OSError: it cannot be read, or it is empty and cannot be written to.
    """
    if repairs := foreign(folder):
        raise DirectoryError(f"cannot use {folder}: {repairs}")
    path = folder / SUPERBLOCK_NAME
    try:
        lock = files.open(path)
    except FileNotFoundError:
        return _make(files, path, segments, segment_bytes)
    try:
        head, error = _read(files, lock.fd)
        if head is Doubt.VERSION:
            raise DirectoryError(other_version(path))
        if isinstance(head, DirectoryHead):
            return Ownership(lock, head)
        said = _said_by(files, segments)
        if said is None and error is not None:
            raise error
        new = said or DirectoryHead(_new_id(), segment_bytes)
        found = Ownership(lock, new, doubts=Counter([head]))
        found.repairs.append(_story(path, f"cannot be believed ({head.value})", said))
    except (OSError, DirectoryError):
        os.close(lock.fd)
        raise
    if lock.writable:
        try:
            found.rewrite(files, path, new)
        except OSError as error:
            # The segments will supply it again at the next start.
            found.repairs.append(f"{path} cannot be written anew ({error.strerror})")
    return found


def other_version(path: Path) -> str:
    """Return the error text for a directory whose file another version has written."""
    return (
        f"{path} is of another version of KVHearth and cannot be understood; use that version, or "
        "remove the directory's content to begin anew"
    )


def _read(files: Files, fd: int) -> tuple[DirectoryHead | Doubt, OSError | None]:
    try:
        return parse_directory_page(files.read_page(fd, 0)), None
    except OSError as error:
        return Doubt.DAMAGED, error


def _make(files: Files, path: Path, segments: list[Path], segment_bytes: int) -> Ownership:
    said = _said_by(files, segments)
    head = said or DirectoryHead(_new_id(), segment_bytes)
    try:
        found = Ownership(_write(files, path, head, replace=False), head)
    except OSError:
        if said is None:
            raise
        # No other daemon can make one either where this one cannot.
        found = Ownership(files.lock_directory(path.parent), head)
    if segments:
        found.doubts[Doubt.TRUNCATED] += 1
        found.repairs.append(_story(path, "is missing", said))
    return found


def _story(path: Path, what: str, said: DirectoryHead | None) -> str:
    if said is None:
        return f"{path} {what} and no segment file says what was in it: a new log was begun"
    return f"{path} {what}: what was in it was taken from the segment files"


def _new_id() -> int:
    return secrets.randbits(64) | 1


def _write(files: Files, path: Path, head: DirectoryHead, *, replace: bool) -> OpenFile:
    """Create and lock the file; its name is durable afterwards."""
    fresh = path.with_name(f"{path.name}.{secrets.token_hex(4)}.new")
    lock = files.open(fresh, create=True)
    try:
        files.write_page(lock.fd, 0, directory_page(head))
        hit("ssd.head_written")
        if replace:
            fresh.rename(path)
        else:
            # A link, not a rename: of two daemons that start at once, one finds the name taken.
            os.link(fresh, path)
    except FileExistsError:
        os.close(lock.fd)
        raise Busy(str(path)) from None
    except OSError:
        os.close(lock.fd)
        raise
    finally:
        fresh.unlink(missing_ok=True)
    # The segments restore the name if a power cut loses it.
    with contextlib.suppress(OSError):
        files.sync_directory(path.parent)
    return lock


# -- witnesses -------------------------------------------------------------------------------------


def _said_by(files: Files, segments: Iterable[Path]) -> DirectoryHead | None:
    """Return the head that most files name. Files whose size agrees with it take precedence."""
    right, others = Counter[DirectoryHead](), Counter[DirectoryHead]()
    for head, size in _witnesses(files, segments):
        (right if head.segment_bytes == size else others)[head] += 1
        if right.total() >= _WITNESSES:
            break
    votes = right or others
    return votes.most_common(1)[0][0] if votes else None


def _witnesses(files: Files, segments: Iterable[Path]) -> Iterator[tuple[DirectoryHead, int]]:
    for path in segments:
        try:
            fd = files.open_raw(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            continue
        try:
            facts = os.fstat(fd)
            head = _said(files, fd, facts.st_size) if stat.S_ISREG(facts.st_mode) else None
        except OSError:
            continue
        finally:
            os.close(fd)
        if head is not None:
            yield head, facts.st_size


def _said(files: Files, fd: int, size: int) -> DirectoryHead | None:
    """Return the head by one file: from its first page, its footer, or else its first record."""
    first = files.read_page(fd, 0)
    if len(first) == PAGE_BYTES:
        head = parse_segment_page(first)
        if not isinstance(head, Doubt):
            return DirectoryHead(head.log_id, head.segment_bytes)
    if size < 2 * PAGE_BYTES or size % PAGE_BYTES:
        return None
    footer = parse_footer_page(files.read_page(fd, size - PAGE_BYTES))
    if isinstance(footer, Footer):
        return DirectoryHead(footer.head.log_id, footer.head.segment_bytes)
    page = files.read_page(fd, PAGE_BYTES)
    row = np.frombuffer(page, RECORD_DTYPE, 1)
    if row["magic"][0] != RECORD_MAGIC or not crc_good(row)[0]:
        return None
    return DirectoryHead(int(row["log_id"][0]), size)
