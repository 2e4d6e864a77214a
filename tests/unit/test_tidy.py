"""Bounds on the length of modules and functions, constructs that no module may contain, and words
that nothing uses.
"""

from __future__ import annotations

import ast
import functools
import importlib
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvhearth.errors import Reason
from kvhearth_server.config.load import Settings
from kvhearth_server.observability.metrics import COUNTERS

ROOT = Path(__file__).resolve().parents[2]
FILE_LINES_MAX = 700
FUNCTION_LINES_MAX = 70
TESTS = ("tests/", "lab/gpu/", "lab/tests/")

CATCH_ALL_ALLOWED = frozenset(
    {
        # a failed connection is not used again
        "client/kvhearth/transports/frames.py",
        "client/kvhearth/transports/tcp.py",
        # libraries of remotes, each with errors of its own; told as one that does not answer
        "lab/kvhearth_lab/harness/remote_server.py",
        # thread mains and supervised tasks: their exceptions are counted and logged
        "client/kvhearth/copiers/cuda.py",
        "client/kvhearth/copiers/host.py",
        "client/kvhearth/copiers/remote.py",
        "client/kvhearth/session/manager.py",
        "client/kvhearth/worker_thread.py",
        "client/kvhearth/session/link.py",
        "server/kvhearth_server/daemon.py",
        "server/kvhearth_server/engine/supervisor.py",
        "server/kvhearth_server/gateway/server.py",
        "server/kvhearth_server/transport/attach.py",
        "server/kvhearth_server/transport/frames.py",
        "server/kvhearth_server/transport/rpc.py",
        # the fail-open boundary: no exception of ours reaches an engine's loop
        "client/kvhearth/fail_open.py",
        "client/kvhearth/connectors/core/scheduler.py",
        "client/kvhearth/connectors/core/fingerprint.py",  # nor one of an engine's own objects
        "client/kvhearth/transfer/copier_pool.py",  # nor a GPU without memory for a copier
    }
)
"""The files that may catch every exception. Add one only with its reason."""

ODD_OPENING = re.compile(r"[`\"(]*(?:What|Who|Whose|Whoever|Whatever|Of|So|As|That)\b")
"""A sentence begins with a verb or a noun that names its subject."""
ODD_SHARE_MAX = 0.03

FOLDERS = "unit|contract|golden|property|integration|sim|engines"
NAMED_TEST = re.compile(rf"\b((?:{FOLDERS})/test_\w+\.py)(?:::(?:[A-Z]\w*::)?(test_\w+))?")
REALTIME = re.compile(r"pytest\.mark\.realtime\((\W)")
REALTIME_MAX = 40

UNPICKLERS = frozenset({"pickle", "marshal", "shelve", "dill", "cloudpickle"})
UNFINISHED = ("TO" + "DO", "FIX" + "ME", "XX" + "X")


class Source(NamedTuple):
    """One module's text and its tree."""

    text: str
    tree: ast.Module


@functools.cache
def sources(*, tests: bool = True) -> dict[str, Source]:
    """Return every module that is not generated, by its path; without the tests' if not wanted."""
    if not tests:
        return {name: each for name, each in sources().items() if not name.startswith(TESTS)}
    found = {}
    for folder in ("client", "server", "lab", "proto", "tests", "deploy"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if "_pb2" not in path.name:
                text = path.read_text(encoding="utf-8")
                found[path.relative_to(ROOT).as_posix()] = Source(text, ast.parse(text, str(path)))
    return found


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


def test_file_length() -> None:
    lengths = {name: len(source.text.splitlines()) for name, source in sources().items()}
    assert {name: n for name, n in lengths.items() if n > FILE_LINES_MAX} == {}
    assert len(sources(tests=False)) > 10


def test_function_length() -> None:
    lengths = {
        f"{name}:{node.lineno} {node.name}": (node.end_lineno or 0) - node.lineno + 1
        for name, source in sources(tests=False).items()
        for node in ast.walk(source.tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert {place: n for place, n in lengths.items() if n > FUNCTION_LINES_MAX} == {}


def test_imports() -> None:
    found = {
        name: {each.partition(".")[0] for each in _imported(source.tree)}
        for name, source in sources().items()
    }
    direct = [name for name, tops in found.items() if tops & {"server", "client"}]
    assert direct == [], "import kvhearth_server and kvhearth"
    assert [name for name, tops in found.items() if tops & UNPICKLERS] == [], "nothing is unpickled"


def test_a_shards_checksum_is_defined_once() -> None:
    """Two others hash what is no shard: the weights' identity, the lines of an SSD's footer."""
    others = [
        name
        for name, source in sources(tests=False).items()
        if "xxhash" in set(_imported(source.tree))
        and Path(name).name not in {"model.py", "weights.py", "format.py"}
    ]
    assert others == [], "use kvhearth.model"


def test_no_module_is_named_like_the_standard_librarys() -> None:
    # proto/v1/types_pb2 has a suffix of its own, and `proto` belongs to no package
    taken = sys.stdlib_module_names - {"__main__"}
    assert [
        name for name in sources(tests=False) if taken & set(Path(name).with_suffix("").parts[1:])
    ] == []


def test_who_catches_everything() -> None:
    lines = {
        name: [
            node.lineno
            for node in ast.walk(source.tree)
            if isinstance(node, ast.ExceptHandler) and _catches_all(node)
        ]
        for name, source in sources(tests=False).items()
        if name not in CATCH_ALL_ALLOWED
    }
    found = {name: places for name, places in lines.items() if places}
    assert found == {}, "name the exceptions, or argue for the file in CATCH_ALL_ALLOWED"


def test_files_are_utf_8_whatever_the_locale_is() -> None:
    found = [
        f"{name}:{node.lineno}"
        for name, source in sources(tests=False).items()
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("read_text", "write_text")
        and "encoding" not in {each.arg for each in node.keywords}
    ]
    assert found == [], "give an encoding"


def test_nothing_is_left_unfinished() -> None:
    assert [(n, word) for n, s in sources().items() for word in UNFINISHED if word in s.text] == []


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


def _sentences(source: Source) -> Iterator[str]:
    """Sentences of all docstrings, strings that stand as statements, and comments of a module."""
    reported = [
        node.value.value
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    ]
    for each in (*reported, *_comments(source.text)):
        for paragraph in re.split(r"\n\s*\n", each):
            found = re.split(r"(?<=[.!?:;])\s+(?=[A-Z`\"(])", " ".join(paragraph.split()))
            yield from (one for one in found if re.search("[A-Za-z]{2}", one))


def test_sentences_begin_with_a_verb_or_a_noun() -> None:
    total, odd = Counter[str](), Counter[str]()
    for name, source in sources().items():
        package = "/".join(name.split("/")[:3][:-1])
        for sentence in _sentences(source):
            total[package] += 1
            odd[package] += bool(ODD_OPENING.match(sentence))
    assert sum(total.values()) > 5000
    assert {name: odd[name] for name in total if odd[name] >= ODD_SHARE_MAX * total[name]} == {}


# -- settings, reasons and counts that nothing in the product uses ---------------------------------

SETTINGS = "server/kvhearth_server/config/model.py"
ERRORS = "client/kvhearth/errors.py"
METRICS = "server/kvhearth_server/observability/metrics/"
GAP = "[a-z_]+"
"""Pattern of a value in an f-string."""
LETTERS_LEAST = 5
"""Letters beside the gaps of a pattern that names anything."""


def _product(without: str) -> Iterator[ast.Module]:
    """Every module of the client and the server, without those of a path."""
    for name, each in sources(tests=False).items():
        if name.startswith(("client/", "server/")) and not name.startswith(without):
            yield each.tree


def _attributes(tree: ast.AST) -> set[str]:
    return {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}


def _texts(tree: ast.AST) -> Iterator[str]:
    """Patterns of all texts of a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield re.escape(node.value)
        elif isinstance(node, ast.JoinedStr):
            parts = [part.value if isinstance(part, ast.Constant) else None for part in node.values]
            yield "".join(GAP if part is None else re.escape(str(part)) for part in parts)


def test_the_tests_that_documents_name_exist() -> None:
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
    named = {name for page in pages for name in NAMED_TEST.findall(page.read_text())}
    missing = []
    for file, test in sorted(named):
        found = sources().get(f"tests/{file}")
        if found is None or (test and f"def {test}(" not in found.text):
            missing.append(f"{file}::{test}")
    assert missing == []


def test_few_pure_tests_need_real_time() -> None:
    marks = [mark for each in sources().values() for mark in REALTIME.findall(each.text)]
    assert len(marks) <= REALTIME_MAX
    assert set(marks) == {'"'}, "a mark names its reason"


def test_what_the_guard_watches_is_called_by_its_modules_name() -> None:
    """It puts its own in the modules' place, which ``from time import sleep`` goes around."""
    watched = {("time", "sleep"), ("asyncio", "sleep"), ("os", "fork"), ("subprocess", "Popen")}
    found = [
        f"{name}: from {node.module} import {each.name}"
        for name, source in sources().items()
        if name.startswith(TESTS)
        for node in ast.walk(source.tree)
        if isinstance(node, ast.ImportFrom)
        for each in node.names
        if (node.module, each.name) in watched
    ]
    assert not found


def test_no_example_is_a_constant_of_a_module_that_happens_to_be_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "happens_to_be_loaded.py").write_text("NUMBER = 123_456_789_123")
    monkeypatch.syspath_prepend(tmp_path)
    number = importlib.import_module("happens_to_be_loaded").NUMBER
    drawn = set()

    @settings(max_examples=500)
    @given(st.integers(123 * 10**9, 124 * 10**9))
    def draw(example: int) -> None:
        drawn.add(example)

    draw()
    assert len(drawn) > 100
    assert number not in drawn


def test_every_setting_is_used() -> None:
    used = set[str]().union(*map(_attributes, _product(SETTINGS)))
    tree = sources()[SETTINGS].tree
    methods = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    reached = set[str]()
    while new := (used & methods.keys()) - reached:
        reached |= new
        used = used.union(*(_attributes(methods[name]) for name in new))
    assert sorted(set(Settings.model_fields) - used) == []


def test_every_reason_is_given() -> None:
    given = {
        node.attr
        for tree in _product(ERRORS)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "Reason"
    }
    assert sorted({each.name for each in Reason} - given) == []


def test_every_count_is_counted() -> None:
    texts = {pattern for tree in _product(METRICS) for pattern in _texts(tree)}
    gaps = [each for each in texts if GAP in each and len(each.replace(GAP, "")) >= LETTERS_LEAST]
    named = re.compile("|".join(f"(?:{each})" for each in gaps))
    left = [each for each in COUNTERS if re.escape(each) not in texts and not named.fullmatch(each)]
    assert left == []
