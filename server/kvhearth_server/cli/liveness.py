"""Asks a daemon whether it serves, by one frame on its attach socket.

Imports a few modules of the standard library and nothing else: a container runs ``kvhearth health``
every few seconds, and importing gRPC, numpy and typer costs it 0.6 s of processor time. Not even
``kvhearth.url`` is imported, since that brings the whole package's ``__init__``; a test compares
the names below with the ones there.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

SOCKET_DIR = "/run/kvhearth"
SOCKET_DIR_ENV = "KVHEARTH_SOCKET_DIR"
CONFIG_ENV = "KVHEARTH_CONFIG"
ATTACH_SOCKET = "attach.sock"
QUESTION = b'{"kind":"health"}'
ANSWER_S = 4.0
"""Longest wait for one answer; less than the Dockerfile's timeout for the health check."""
_PAUSE_S = 0.1
_HEADER_BYTES = 4
_FRAME_BYTES_MAX = 256 << 10
_DRAINS = "the daemon drains: it takes no stores"


def main(words: list[str]) -> int | None:
    """Run ``kvhearth health`` with these words after the verb; return its exit status.

    Returns None for words that need the whole command line: help, wrong usage, and a settings file
    that has to be parsed for the directory.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--socket-dir")
    parser.add_argument("--wait", type=float, default=0.0)
    parser.add_argument("--json", action="store_true")
    try:
        given, left = parser.parse_known_args(words)
    except argparse.ArgumentError:
        return None
    folder = given.socket_dir or os.environ.get(SOCKET_DIR_ENV)
    folder = folder or _configured(os.environ.get(CONFIG_ENV))
    if left or not given.wait >= 0 or folder is None:
        return None
    return run(os.path.abspath(os.path.expanduser(folder)), given.wait, as_json=given.json)


def _configured(path: str | None) -> str | None:
    """Return the directory that a settings file gives; None if finding it takes a YAML parser."""
    if not path:
        return _default()
    try:
        with open(path, encoding="utf-8") as file:
            lines = [line for line in file.read(1 << 20).splitlines() if "socket_dir" in line]
    except (OSError, ValueError):
        return None
    if not lines:
        return _default()
    name, _, value = lines[0].rstrip().partition(": ")
    plain = value.replace("/", "").replace("-", "").replace("_", "").isalnum()
    return value if len(lines) == 1 and name == "socket_dir" and plain and value[0] == "/" else None


def _default() -> str | None:
    """Return the system's directory if it is the default of ``kvhearth.url.find_socket_dir``."""
    ours = os.geteuid() == 0 or os.access(SOCKET_DIR, os.W_OK | os.X_OK)
    return SOCKET_DIR if ours else None


def run(folder: str, wait_s: float, *, as_json: bool) -> int:
    """Look until the daemon serves or ``wait_s`` are over; print the verdict, return the status."""
    end = time.monotonic() + wait_s
    problem, degraded, shut = look(folder)
    while problem and time.monotonic() < end:
        time.sleep(_PAUSE_S)
        problem, degraded, shut = look(folder)
    if as_json:
        import json

        found = {
            "serving": not problem,
            "problem": problem,
            "degraded": degraded,
            "doors_shut": shut,
        }
        sys.stdout.write(json.dumps(found) + "\n")
    elif not problem:
        sys.stdout.write("serving\n")
    for reason in degraded:
        sys.stderr.write(f"kvhearth: warning: the SSD tier is degraded: {printable(reason)}\n")
    for reason in shut:
        sys.stderr.write(f"kvhearth: warning: a door is shut: {printable(reason)}\n")
    if problem:
        sys.stderr.write(f"kvhearth: error: {printable(problem)}\n")
    return 1 if problem else 0


def look(folder: str, answer_s: float = ANSWER_S) -> tuple[str, list[str], list[str]]:
    """Return why the daemon does not serve ("" if it does), why its SSD tier is degraded, and which
    doors are shut for the moment.
    """
    path = os.path.join(folder, ATTACH_SOCKET)
    try:
        with socket.socket(socket.AF_UNIX) as line:
            line.settimeout(answer_s)
            line.connect(path)
            line.sendall(len(QUESTION).to_bytes(_HEADER_BYTES, "little") + QUESTION)
            answer = _answer(line, time.monotonic() + answer_s)
    except PermissionError:
        return denied(path), [], []
    except (TimeoutError, BlockingIOError):  # a unix socket whose backlog is full does not wait
        return f"the daemon at {path} does not answer within {answer_s:g} s", [], []
    except (FileNotFoundError, NotADirectoryError, ConnectionRefusedError):
        return away(path), [], []
    except OSError as error:
        return f"cannot ask the daemon at {path}: {error.strerror or error}", [], []
    if not isinstance(answer, dict):
        return f"what answers at {path} is no KVHearth daemon", [], []
    if answer.get("kind") == "refused":
        return f"the daemon at {path} refuses: {answer.get('message')}", [], []
    degraded, shut = ([*map(str, answer.get(name) or ())] for name in ("degraded", "doors_shut"))
    return ("" if answer.get("serving") else _DRAINS), degraded, shut


def _answer(line: socket.socket, end: float) -> object:
    """Read the frame that answers; return None for any other bytes."""
    import json

    got = b""
    while len(got) < _HEADER_BYTES or len(got) < _HEADER_BYTES + _size(got):
        line.settimeout(max(0.001, end - time.monotonic()))
        data = line.recv(1 << 16)
        if not data or (len(got) >= _HEADER_BYTES and _size(got) > _FRAME_BYTES_MAX):
            return None
        got += data
    try:
        return json.loads(got[_HEADER_BYTES : _HEADER_BYTES + _size(got)])
    except ValueError:
        return None


def _size(got: bytes) -> int:
    return int.from_bytes(got[:_HEADER_BYTES], "little")


def away(path: str) -> str:
    """Return the message that nothing listens at a socket."""
    return (
        f"no daemon answers at {path}; start one with kvhearth serve, "
        "or name another directory with --socket-dir"
    )


def denied(path: str) -> str:
    """Return why this user may not use a socket: its owner, or the directory that hides it."""
    import grp
    import pwd

    at = path
    while True:
        try:
            found = os.stat(at)
            break
        except OSError:
            at = os.path.dirname(at)
    owner, me = (_named(pwd.getpwuid, number) for number in (found.st_uid, os.geteuid()))
    group = _named(grp.getgrgid, found.st_gid)
    remedy = f"run this as {owner}" if owner != me else f"chmod {at}"
    if found.st_mode & 0o010:
        remedy += f" or add {me} to the group {group}"
    return (
        f"user {me} may not use {path}: {at} belongs to {owner}:{group} with mode "
        f"{found.st_mode & 0o7777:04o}; {remedy}"
    )


def _named(find: Callable[[int], Sequence[Any]], number: int) -> str:
    """Return the name of a user or group, its number without one."""
    try:
        return str(find(number)[0])
    except KeyError:
        return str(number)


def printable(text: str) -> str:
    return "".join(each if each.isprintable() else "?" for each in text)
