"""Identity of a model's weights, for engines of every kind."""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from logging import INFO, WARNING
from pathlib import Path

import xxhash

from kvhearth.contract import PRIVATE
from kvhearth.counters import log_event

_PIECE_BYTES = 8 << 20
_KEPT_FROM_BYTES = 16 << 20
_FILES_MAX = 4096
_KEPT_MAX = 4096
_IGNORED = (".git", "__pycache__", ".cache")
_COMMIT = re.compile(r"[0-9a-f]{40}")

_lock = threading.Lock()


@dataclass(frozen=True)
class Weights:
    """Identity of the weights: ``model`` and ``revision`` of a contract."""

    model: str
    revision: str


def name_weights(name: str, revision: str, run: str, given: str, option: str) -> Weights:
    """Name the weights: a hub's commit, or the digest of a local directory's files.

    Args:
        name: the model's directory, or its name in a hub.
        revision: revision in the hub that the engine was told, or empty.
        run: name of this run of the engine, for weights that have no other.
        given: the user's own name for the weights, or empty.
        option: where the user gives it, for the warning of weights that have no name.
    """
    local = Path(name).expanduser()
    if given:
        return Weights("given" if local.is_dir() else name, given)
    if local.is_dir():
        try:
            return Weights("directory", directory_digest(local))
        except OSError as error:
            log_event(
                WARNING,
                "weights.private",
                "the weights have no digest, nobody can share their KV",
                error=error,
            )
            return Weights("directory", f"{PRIVATE}{run}")
    if _COMMIT.fullmatch(revision):
        return Weights(name, revision)
    log_event(
        WARNING,
        "weights.private",
        "the revision is no commit, its KV is kept for this engine alone: set 'revision' in "
        f"{option} to share it",
        model=name,
        revision=revision,
    )
    return Weights(name, f"{PRIVATE}{run}")


def directory_digest(folder: Path) -> str:
    """Return the hex digest of the names and bytes of all files below ``folder``.

    Large files are read once: their digests are remembered in the user's cache folder, by device,
    inode, size and times of change.

    Raises:
        OSError: a file cannot be read, or there are more than 4096.
    """
    whole = hashlib.sha256()
    for path in _files(folder):
        name = path.relative_to(folder).as_posix()
        whole.update(f"{len(name)}:{name}:".encode())
        whole.update(_file_digest(path))
    return whole.hexdigest()


def _files(folder: Path) -> list[Path]:
    found = sorted(_walk(folder))
    if len(found) > _FILES_MAX:
        raise OSError(f"{folder} has more than {_FILES_MAX} files")
    return found


def _walk(folder: Path) -> Iterator[Path]:
    for base, folders, files in os.walk(folder, followlinks=False):
        folders[:] = [name for name in folders if name not in _IGNORED]
        for name in files:
            path = Path(base) / name
            if path.is_file():
                yield path


def _file_digest(path: Path) -> bytes:
    facts = path.stat()
    if facts.st_size < _KEPT_FROM_BYTES:
        return _read(path)
    mark = f"{facts.st_dev}:{facts.st_ino}:{facts.st_size}:{facts.st_mtime_ns}:{facts.st_ctime_ns}"
    with _lock:
        kept = _load()
        if mark in kept:
            return bytes.fromhex(kept[mark])
        log_event(
            INFO,
            "weights.reading",
            "reading a file once to know the weights",
            path=path,
            mib=facts.st_size >> 20,
        )
        digest = _read(path)
        kept[mark] = digest.hex()
        _save(kept)
        return digest


def _read(path: Path) -> bytes:
    digest = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        while piece := file.read(_PIECE_BYTES):
            digest.update(piece)
    return digest.digest()


def _store() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "kvhearth" / "digests.json"


def _load() -> dict[str, str]:
    try:
        data = json.loads(_store().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(data, dict):
        return {}
    return {mark: text for mark, text in data.items() if isinstance(text, str) and len(text) == 32}


def _save(kept: dict[str, str]) -> None:
    """Save the digests, best effort: without them the files are read again at the next start."""
    path = _store()
    some = dict(list(kept.items())[-_KEPT_MAX:])
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        part = path.with_suffix(f".{os.getpid()}.part")
        part.write_text(json.dumps(some), encoding="utf-8")
        part.rename(path)
    except OSError as error:
        log_event(
            INFO, "weights.not_remembered", "the weights' digest is not remembered", error=error
        )
