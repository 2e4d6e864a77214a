"""Bounds on the length of modules and functions, and constructs that no module may contain."""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILE_LINES_MAX = 700
FUNCTION_LINES_MAX = 70

CATCH_ALL_ALLOWED = frozenset(
    {
        "client/kvhearth/transports/frames_unix.py",  # a failed connection is not used again
        # thread mains and supervised tasks: their exceptions are counted and logged
        "client/kvhearth/copiers/cuda.py",
        "client/kvhearth/copiers/host.py",
        "client/kvhearth/session/manager.py",
        "client/kvhearth/worker_thread.py",
        "client/kvhearth/session/attach.py",
        "server/kvhearth_server/daemon.py",
        "server/kvhearth_server/engine/supervisor.py",
        "server/kvhearth_server/transport/attach.py",
        "server/kvhearth_server/transport/frames.py",
        "server/kvhearth_server/transport/rpc/errors.py",
        # the fail-open boundary: no exception of ours reaches an engine's loop
        "client/kvhearth/fail_open.py",
        "client/kvhearth/connectors/vllm/fail_open.py",
        "client/kvhearth/transfer/copier_pool.py",  # nor a GPU without memory for a copier
    }
)
"""The files that may catch every exception. Add one only with its reason."""

ODD_OPENING = re.compile(r"[`\"(]*(?:What|Who|Whose|Whoever|Whatever|Of|So|As|That)\b")
"""A sentence begins with a verb or a noun that names its subject."""
ODD_SHARE_MAX = 0.03

UNPICKLERS = frozenset({"pickle", "marshal", "shelve", "dill", "cloudpickle"})
UNFINISHED = ("TO" + "DO", "FIX" + "ME", "XX" + "X")


def _sources() -> list[Path]:
    folders = ("client", "server", "lab", "proto", "tests", "deploy")
    found = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    return sorted(path for path in found if "_pb2" not in path.name)


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


SOURCES = _sources()
CODE = [path for path in SOURCES if not _name(path).startswith("tests/")]
each_source = pytest.mark.parametrize("path", SOURCES, ids=_name)
each_code = pytest.mark.parametrize("path", CODE, ids=_name)


def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def _imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module


def _catches_all(handler: ast.ExceptHandler) -> bool:
    caught = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    names = {each.id for each in caught if isinstance(each, ast.Name)}
    return handler.type is None or bool(names & {"Exception", "BaseException"})


def test_there_is_something_to_look_at() -> None:
    assert len(CODE) > 10


@each_source
def test_file_length(path: Path) -> None:
    count = len(path.read_text(encoding="utf-8").splitlines())
    assert count <= FILE_LINES_MAX


@each_code
def test_function_length(path: Path) -> None:
    long = []
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or 0) - node.lineno + 1
            if lines > FUNCTION_LINES_MAX:
                long.append(f"line {node.lineno}: {node.name} has {lines} lines")
    assert long == []


@each_source
def test_imports(path: Path) -> None:
    tops = {name.partition(".")[0] for name in _imported(_tree(path))}
    assert not tops & {"server", "client"}, "import kvhearth_server and kvhearth"
    assert not tops & UNPICKLERS, "nothing is unpickled"


@each_code
def test_no_module_is_named_like_the_standard_librarys(path: Path) -> None:
    parts = path.relative_to(ROOT).with_suffix("").parts[1:]
    # proto/v1/types_pb2 has a suffix of its own, and `proto` belongs to no package
    assert not set(parts) & (sys.stdlib_module_names - {"__main__"})


@each_code
def test_who_catches_everything(path: Path) -> None:
    tree = _tree(path)
    lines = [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.ExceptHandler) and _catches_all(node)
    ]
    if _name(path) not in CATCH_ALL_ALLOWED:
        assert lines == [], "name the exceptions, or argue for the file in CATCH_ALL_ALLOWED"


@each_source
def test_nothing_is_left_unfinished(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert [word for word in UNFINISHED if word in text] == []


def _comments(text: str) -> Iterator[str]:
    """Runs of comment lines, each run as one text."""
    run: list[str] = []
    last = (0, 0)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            if token.start != (last[0] + 1, last[1]):
                yield " ".join(run)
                run = []
            run.append(token.string.lstrip("#:! "))
            last = token.start
    yield " ".join(run)


def _sentences(text: str) -> Iterator[str]:
    """Sentences of all docstrings, strings that stand as statements, and comments of a module."""
    told = [
        node.value.value
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    ]
    for each in (*told, *_comments(text)):
        for paragraph in re.split(r"\n\s*\n", each):
            found = re.split(r"(?<=[.!?:;])\s+(?=[A-Z`\"(])", " ".join(paragraph.split()))
            yield from (one for one in found if re.search("[A-Za-z]{2}", one))


def test_sentences_begin_with_a_verb_or_a_noun() -> None:
    total, odd = Counter[str](), Counter[str]()
    for path in SOURCES:
        package = "/".join(_name(path).split("/")[:3][:-1])
        for sentence in _sentences(path.read_text(encoding="utf-8")):
            total[package] += 1
            odd[package] += bool(ODD_OPENING.match(sentence))
    assert sum(total.values()) > 5000
    assert {name: odd[name] for name in total if odd[name] >= ODD_SHARE_MAX * total[name]} == {}
