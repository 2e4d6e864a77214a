"""Parts of ``lab/gpu/run.py`` on a scripted GPU: they pass there, and find planted defects."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvhearth.copiers.base import Copier, Done
from kvhearth.model import I64, Records
from kvhearth_lab.bench.gpu import bandwidth as bench
from kvhearth_lab.bench.gpu.figures import BENCH_FIGURES
from kvhearth_lab.bench.gpu.llama import TINY, make_model, prefill
from kvhearth_lab.bench.gpu.stage import AUTO

torch = pytest.importorskip("torch")

from doubles.cuda_stage import ScriptedCudaStage  # noqa: E402
from gpu_parts import bandwidth, correctness, faults, registration, verification  # noqa: E402
from gpu_parts.common import Report, attempt  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 100.0
Wrap = Callable[[Copier], Copier]


class Defective:
    """A copier whose loads and stores are altered by a test."""

    def __init__(self, copier: Any) -> None:
        self._copier = copier

    def __getattr__(self, name: str) -> Any:
        return getattr(self._copier, name)


class ShortLoads(Defective):
    """Leaves the last block of a load out, and reports it as loaded."""

    def load(self, boot_id: str, extents: Records, pages: I64, **options: Any) -> Any:
        self._left_out = len(extents) - 1
        return self._copier.load(boot_id, extents[:-1], pages[:-1], **options)

    def wait(self, ticket: Any, deadline_s: float) -> Done:
        done = self._copier.wait(ticket, deadline_s)
        if done.checksums is None and ticket.kind == "load":
            return replace(done, ok=np.append(done.ok, True))
        return done


class ShiftedStores(Defective):
    """Stores each page into the slot of its neighbour."""

    def store(self, boot_id: str, pages: I64, extents: Records, **options: Any) -> Any:
        return self._copier.store(boot_id, np.roll(pages, 1), extents, **options)


class Careless(Defective):
    """Reports every block as loaded."""

    def wait(self, ticket: Any, deadline_s: float) -> Done:
        done = self._copier.wait(ticket, deadline_s)
        return replace(done, ok=np.ones_like(done.ok), reasons={})


@pytest.fixture
def report(tmp_path: Path) -> Report:
    return Report(tmp_path / "result.json", SECONDS)


def failures_of(report: Report, part: Any, wrap: Wrap = lambda copier: copier) -> list[str]:
    stage = ScriptedCudaStage(wrap)
    part.measure(report, stage)
    return report.failures()


# -- parts -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_correctness_compares_every_layout(report: Report) -> None:
    assert failures_of(report, correctness) == []
    names = {layout.name for layout in correctness.layouts(ScriptedCudaStage())}
    for name in names:
        for check in ("slots hold the pages' bytes", "a load follows the zeroing of its pages"):
            assert report.values["checks"][f"{name}: {check}"]["passed"]
    assert report.values["figures"]["correctness_failures"] == 0


@pytest.mark.parametrize(
    ("defect", "check"),
    [
        (ShortLoads, "block-outermost: pages hold the loaded bytes"),
        (ShiftedStores, "MLA pages: slots hold the pages' bytes"),
        (Careless, "ragged: a flipped bit is found"),
    ],
)
def test_correctness_finds_a_defective_copier(report: Report, defect: Wrap, check: str) -> None:
    stage, name = ScriptedCudaStage(defect), check.partition(":")[0]
    layout = next(each for each in correctness.layouts(stage) if each.name == name)
    correctness.run_layout(report, stage, layout, AUTO, 1)
    assert check in report.failures()
    assert report.end("") == 1


def test_registration_checks_the_replayed_graph(report: Report) -> None:
    stage = ScriptedCudaStage()
    registration.measure(report, stage)
    # The scripted graph computes nothing when it is replayed.
    assert report.failures() == ["the captured graph is right"]
    assert report.values["contexts"] == [1, 0]
    assert {row["pages"] for row in report.values["rows"]} >= {"4k", "thp"}
    assert {"register_s_per_gib", "register_64gib_start_s"} <= set(report.values["figures"])
    assert stage.scripted.registered == {}
    assert stage.scripted.left_behind() == []


def test_a_registration_that_is_refused_is_reported(report: Report) -> None:
    stage = ScriptedCudaStage()
    stage.scripted.fail_call = "cudaHostRegister"
    registration.measure(report, stage)
    assert {"a piece was registered", "the arena is registered"} <= set(report.failures())
    assert any("refused" in reason for reason in report.values["left_out"].values())


def test_a_broken_capture_is_reported(report: Report) -> None:
    stage = ScriptedCudaStage()
    stage.scripted.broken_by.append("cudaEventQuery")
    registration.measure(report, stage)
    assert "a capture survives a registration" in report.failures()


def test_bandwidth_fills_every_figure(report: Report) -> None:
    assert failures_of(report, bandwidth) == []
    wanted = {each.name for each in BENCH_FIGURES if not each.name.startswith(("ttft", "both"))}
    assert wanted <= set(report.values["figures"])
    assert set(report.values["ceiling"]) == set(bench.DIRECTIONS)
    assert report.values["left_out"] == 0


def test_verification_finds_a_flipped_bit(report: Report) -> None:
    assert failures_of(report, verification) == []
    assert set(report.values["fractions"]) == {"0", "0.015625", "1"}


def test_verification_that_is_not_done_is_noticed(tmp_path: Path) -> None:
    report = Report(tmp_path / "result.json", SECONDS)
    assert "a flipped bit is found" in failures_of(report, verification, Careless)


def test_torn_slots_are_noticed(report: Report) -> None:
    faults.slots_part(report, ScriptedCudaStage(), faults.REHEARSAL)
    assert report.failures() == []
    faults.slots_part(report, ScriptedCudaStage(Careless), faults.REHEARSAL)
    assert {"a flipped byte is found", "a dead daemon's blocks are refused"} <= set(
        report.failures()
    )


def test_an_exception_is_a_result(tmp_path: Path) -> None:
    def broken(report: Report, stage: Any) -> None:
        report.put(before=1)
        raise ValueError("planted")

    report = Report(tmp_path / "result.json", SECONDS)
    assert attempt(broken, report, "no device") == 1
    told = json.loads((tmp_path / "result.json").read_text())
    assert (told["status"], told["reason"], told["before"]) == (
        "failed",
        "ValueError: planted",
        1,
    )


def test_the_kit_has_what_the_image_has() -> None:
    """A bare CUDA machine has torch, numpy, grpcio, xxhash and pytest; the kit has the rest."""

    def names(path: str) -> set[str]:
        text = (ROOT / path).read_text()
        return set(re.findall(r"^([a-z0-9-]+)==", text, re.MULTILINE))

    there = {"numpy", "grpcio", "xxhash", "colorama"}
    assert names("lab/gpu/kit.txt") == names("deploy/docker/requirements.lock") - there


@pytest.mark.parametrize("plain", [True, False])
def test_a_model_continues_from_given_kv(plain: bool) -> None:
    if not plain:
        pytest.importorskip("transformers")
    model = make_model(torch, TINY, "cpu", plain=plain)
    tokens = torch.arange(40)[None] % TINY.vocabulary
    whole, whole_kv = model.forward(tokens, None)
    kv = prefill(torch, model, tokens[:, :39])
    step, step_kv = model.forward(tokens[:, 39:], kv)
    parts, _ = model.forward(tokens[:, 20:], model.forward(tokens[:, :20], None)[1])
    assert whole.shape == (TINY.vocabulary,)
    assert step_kv[0][0].shape == (1, TINY.kv_heads, 40, TINY.head_dim)
    for other in (step, parts):
        assert torch.allclose(whole, other, atol=0.1)
    assert len(whole_kv) == TINY.layers
    changed, _ = model.forward(tokens[:, 39:], [(k, v * 0) for k, v in kv])
    assert not torch.allclose(whole, changed, atol=0.2)
