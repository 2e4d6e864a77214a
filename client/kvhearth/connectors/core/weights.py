"""Identity of a model's weights, for engines of every kind."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import threading
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from logging import INFO, WARNING
from pathlib import Path

import xxhash

from kvhearth.contract import PRIVATE
from kvhearth.counters import log_event

_PIECE_BYTES = 8 << 20
_KEPT_FROM_BYTES = 16 << 20
_PATHS_MAX = 4096
_KEPT_MAX = 4096
_IGNORED = (".git", "__pycache__", ".cache")
_COMMIT = re.compile(r"[0-9a-f]{40}")

_lock = threading.Lock()
_known: dict[str, str] = {}
"""Digests that this process has computed: a model's directory is looked at more than once, and the
user's cache folder may not be writable.
"""


@dataclass(frozen=True)
class Weights:
    """Identity of the weights: ``model`` and ``revision`` of a contract."""

    model: str
    revision: str


def name_weights(
    name: str, revision: str, run: str, given: str, option: str, *, elsewhere: str = ""
) -> Weights:
    """Name the weights: a hub's commit, or the digest of a local directory's files.

    Args:
        name: the model's directory, or its name in a hub.
        revision: revision in the hub that the engine was told or has found, or empty.
        run: name of this run of the engine, for weights that have no other.
        given: the user's own name for the weights, or empty.
        option: where the user gives it, for the warning of weights that have no name.
        elsewhere: what they are if the engine takes them from another place than ``name``.
    """
    local = Path(name).expanduser()
    if given:
        return Weights("given" if local.exists() else name, given)
    problem = f"{elsewhere} have no digest" if elsewhere else ""
    if local.is_dir() and not problem:
        try:
            return Weights("directory", directory_digest(local))
        except OSError as error:
            problem = f"the weights have no digest ({error})"
    if _COMMIT.fullmatch(revision) and not problem and not local.exists():
        return Weights(name, revision)
    problem = problem or f"no commit of {name} is known"
    return _private("directory" if local.exists() else name, run, problem, option)


def unless_unknown(
    weights: Weights, unknown: Collection[str], run: str, given: str, option: str
) -> Weights:
    """Return the weights, or a name that no other run has if settings are unknown.

    Args:
        unknown: settings that cannot be compared with those of another run.
        run, given, option: as of ``name_weights``.
    """
    if not unknown or given or weights.revision.startswith(PRIVATE):
        return weights
    problem = f"nothing tells whether {', '.join(unknown)} is the same in another run"
    return _private(weights.model, run, problem, option)


def _private(model: str, run: str, problem: str, option: str) -> Weights:
    log_event(
        WARNING,
        "weights.private",
        f"{problem}: its KV is kept for this run of the engine alone; set 'revision' in {option} "
        "to share it",
        model=model,
    )
    return Weights(model, f"{PRIVATE}{run}")


def directory_digest(folder: Path) -> str:
    """Return the hex digest of the names and bytes of all files below ``folder``.

    Links are followed, also into directories. Large files are read once: their digests are
    remembered in the user's cache folder, by device, inode, size and times of change.

    Raises:
        OSError: a file cannot be read, or there are more than 4096 files and directories.
    """
    whole = hashlib.sha256()
    for path in _files(folder):
        name = os.fsencode(path.relative_to(folder))
        whole.update(b"%d:%s:" % (len(name), name))
        whole.update(file_digest(path))
    return whole.hexdigest()


def _files(folder: Path) -> list[Path]:
    found = list(itertools.islice(_walk(folder, ()), _PATHS_MAX + 1))
    if len(found) > _PATHS_MAX:
        raise OSError(f"{folder} has more than {_PATHS_MAX} files and directories")
    return sorted(path for path in found if path.is_file())


def _walk(folder: Path, above: tuple[tuple[int, int], ...]) -> Iterator[Path]:
    """Yield all that is below a directory, through links, as an engine finds it.

    Args:
        above: device and inode of the directories that it lies in; a link to one of them ends.
    """
    facts = folder.stat()
    mark = (facts.st_dev, facts.st_ino)
    if mark in above:
        return
    try:
        names = os.listdir(folder)
    except PermissionError:  # closed to the engine, too, such as a volume's lost+found
        return
    for name in names:
        path = folder / name
        yield path
        if name not in _IGNORED and path.is_dir():
            yield from _walk(path, (*above, mark))


def file_digest(path: Path) -> bytes:
    """Return the digest of a file's bytes, 16 bytes.

    Raises:
        OSError: it cannot be read.
    """
    facts = path.stat()
    if facts.st_size < _KEPT_FROM_BYTES:
        return _read(path)
    mark = f"{facts.st_dev}:{facts.st_ino}:{facts.st_size}:{facts.st_mtime_ns}:{facts.st_ctime_ns}"
    with _lock:
        kept = {**_load(), **_known}
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
        _known[mark] = kept[mark] = digest.hex()
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
