"""``lab/mutate/run.py``: its list can be planted, and it tells a defect from a harmless change."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def mutate() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("kvh_mutate", ROOT / "lab" / "mutate" / "run.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["kvh_mutate"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules["kvh_mutate"]


def test_every_defect_can_be_planted(mutate: ModuleType) -> None:
    listed = mutate.defects()
    assert len({each.name for each in listed}) == len(listed)
    for each in listed:
        text = (ROOT / each.file).read_text(encoding="utf-8")
        compile(each.planted(text), each.file, "exec")
        assert each.planted(text) != text, each.name
        assert each.files(), each.name


def test_a_defect_is_noticed_and_a_harmless_change_survives(
    mutate: ModuleType, tmp_path: Path
) -> None:
    defect = next(each for each in mutate.defects() if each.name == "remote-group")
    defect = replace(defect, tests=("unit/test_remote_tier_parts.py",))
    tree = mutate.Tree(tmp_path)
    assert mutate.look(tree, defect).tests
    assert (tmp_path / defect.file).read_bytes() == (ROOT / defect.file).read_bytes()
    assert mutate.look(tree, replace(defect, new=defect.old)).survived


def test_text_that_is_not_there_once_is_refused(mutate: ModuleType) -> None:
    defect = mutate.Defect("one", "goes wrong", "some.py", "a", "b", ())
    for text in ("", "aa"):
        with pytest.raises(mutate.MutateError, match="one"):
            defect.planted(text)
