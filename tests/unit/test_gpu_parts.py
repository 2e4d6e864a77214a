"""Parts of ``tests/gpu/run.py`` on a scripted GPU: they pass there, and find planted defects."""

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
from kvhearth.model import FLAG_SUMMED, I64, Records
from kvhearth_lab.bench.gpu import bandwidth as bench
from kvhearth_lab.bench.gpu import ttft
from kvhearth_lab.bench.gpu.bare_arena import HUGEPAGE_BYTES, BareArena, spare_bytes
from kvhearth_lab.bench.gpu.figures import BENCH_FIGURES, RUN_FIGURES, draw, judged
from kvhearth_lab.bench.gpu.llama import LLAMA_8B, TINY, make_model, prefill
from kvhearth_lab.bench.gpu.stage import AUTO, LOOP, METHOD_ENV, chosen, copy_methods

torch = pytest.importorskip("torch")

from gpu_parts import bandwidth, correctness, decode, faults, registration, verification  # noqa: E402
from gpu_parts.common import Report, attempt  # noqa: E402
from run import fits  # noqa: E402
from support.cuda_stage import ScriptedCudaStage  # noqa: E402

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


def test_a_sanitized_case_runs() -> None:
    assert correctness.sanitized(ScriptedCudaStage()) == 0


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


def test_bandwidth_reports_cells_that_fail(report: Report) -> None:
    class Failing(Defective):
        def wait(self, ticket: Any, deadline_s: float) -> Done:
            done = self._copier.wait(ticket, deadline_s)
            return replace(done, ok=np.zeros_like(done.ok))

    assert set(failures_of(report, bandwidth, Failing)) == {
        "cells are measured",
        "every layout with a target was measured",
    }
    assert report.values["rows"] == []


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


def test_sizes_shrink_to_the_memory() -> None:
    full = decode.FULL
    assert decode.shrunk(full, 80 << 30, 80 << 30) == full
    assert decode.shrunk(full, 5 << 30, 80 << 30).prompt_tokens == full.prompt_tokens // 2
    assert decode.shrunk(full, 80 << 30, 1 << 30).prompt_tokens == 2048
    small = faults.fitting(faults.FULL, 1 << 30)
    assert faults.arena_bytes(small) < 1 << 30 < faults.arena_bytes(faults.FULL)


# -- the frame -------------------------------------------------------------------------------------


def test_statuses_of_a_report(tmp_path: Path) -> None:
    def ended(problem: str = "", **values: Any) -> tuple[int, str, str]:
        path = tmp_path / "result.json"
        made = Report(path, SECONDS)
        for name in values.get("failed", ()):
            made.check(name, False)
        for reason in values.get("shortened", ()):
            made.shorten(reason)
        code = made.end(problem)
        told = json.loads(path.read_text())
        return code, told["status"], told.get("reason", "")

    assert ended() == (0, "ok", "")
    assert ended("no device")[:2] == (0, "skipped")
    assert ended(shortened=["no time"]) == (0, "shortened", "no time")
    assert ended("no device", failed=["bytes"]) == (1, "failed", "failed checks: bytes")


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


@pytest.mark.parametrize(
    ("wheel", "minors"),
    [
        ("rich-15.0.0-py3-none-any.whl", {11, 12, 13}),
        ("shellingham-1.5.4-py2.py3-none-any.whl", {11, 12, 13}),
        ("protobuf-6.33.5-cp39-abi3-manylinux2014_x86_64.whl", {11, 12, 13}),
        ("some-1.0-cp312-abi3-manylinux2014_x86_64.whl", {12, 13}),
        ("pydantic_core-2.5-cp312-cp312-manylinux_2_17_x86_64.manylinux2014_x86_64.whl", {12}),
        ("pydantic_core-2.5-cp312-cp312-macosx_11_0_arm64.whl", set()),
    ],
)
def test_wheels_that_fit_an_interpreter(wheel: str, minors: set[int]) -> None:
    assert {minor for minor in (11, 12, 13) if fits(wheel, minor)} == minors


def test_the_kit_has_what_the_image_has() -> None:
    """A bare CUDA machine has torch, numpy, grpcio, xxhash and pytest; the kit has the rest."""

    def names(path: str) -> set[str]:
        text = (ROOT / path).read_text()
        return set(re.findall(r"^([a-z0-9-]+)==", text, re.MULTILINE))

    there = {"numpy", "grpcio", "xxhash", "colorama"}
    assert names("tests/gpu/kit.txt") == names("deploy/docker/requirements.lock") - there


# -- the benchmark ---------------------------------------------------------------------------------


def test_figures_are_judged() -> None:
    assert len({each.name for each in RUN_FIGURES}) == len(RUN_FIGURES)
    found = judged({"load_mla_ratio": 0.79, "store_mla_ratio": 0.8}, RUN_FIGURES)
    assert found["missed"] == ["load_mla_ratio"]
    assert "ttft_16k_ratio" in found["not_measured"]
    assert "store_mla_ratio" not in found["not_measured"]


def test_a_run_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    row = {"scattered": True, "method": AUTO, "direction": "load", "page_bytes": 1, "gbs": 2.0}
    rows = [row, {**row, "direction": "store"}]
    prompts = {"2048": {"cold_s": 1.0, "warm_s": 0.1}}
    draw({"bandwidth": {"rows": rows}, "ttft": {"rows": prompts}}, tmp_path / "out.png")
    assert (tmp_path / "out.png").stat().st_size > 1000


def test_methods_are_chosen_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    monkeypatch.delenv(METHOD_ENV, raising=False)
    with chosen(LOOP):
        assert os.environ[METHOD_ENV] == LOOP
    assert METHOD_ENV not in os.environ
    assert LOOP in copy_methods()
    assert copy_methods()[0] in (AUTO, LOOP)


def test_targets_are_measured_first() -> None:
    cells = bench.cells(bench.FULL, [AUTO, LOOP])
    targets = [each.name for each in bench.TARGETS]
    first = [cell for cell in cells[1:] if cell.layout.name in targets][: 3 * len(targets)]
    assert cells[1 : 1 + len(first)] == first
    assert {cell.method for cell in first} == {AUTO}
    assert {cell.layout.page_bytes for cell in cells} >= {16 << 10, 4 << 20}
    assert max(cell.blocks for cell in cells) == 2048


def test_a_bare_arena_counts_its_slots() -> None:
    arena = BareArena(HUGEPAGE_BYTES + 1)
    assert arena.size_bytes == 2 * HUGEPAGE_BYTES
    extents = arena.extents(np.array([0, 3]), 4096)
    arena.slot(extents[1])[:] = 7
    assert arena.view(0)[3 * 4096 : 4 * 4096].min() == 7
    summed = arena.with_checksums(extents, FLAG_SUMMED)
    assert summed["checksum"][0] != summed["checksum"][1]
    with pytest.raises(Exception, match="outside"):
        arena.extents(np.array([1024]), 4096)
    assert 0 < spare_bytes() < 1 << 50
    assert arena.huge_bytes() in (0, arena.size_bytes)


def test_prompts_that_fit_into_memory() -> None:
    left_out: dict[str, str] = {}
    sizes = replace(ttft.FULL, prompt_tokens=(2048, 4096))
    assert ttft.fitting(sizes, 3072 * LLAMA_8B.token_bytes, left_out) == (2048,)
    assert list(left_out) == ["4096"]
    assert LLAMA_8B.token_bytes == 128 << 10


def test_rows_of_both_processes(tmp_path: Path) -> None:
    for role, last in ((ttft.COLD, 0.5), (ttft.WARM, 0.25)):
        np.save(tmp_path / f"{role}-16384.npy", np.array([1.0, last]))
    cold = {"rows": {"16384": {"cold_s": 2.0}, "32768": {"cold_s": 4.0}}}
    rows = ttft.rows_of(cold, {"rows": {"16384": {"warm_s": 0.1}}}, tmp_path)
    assert list(rows) == ["16384"]
    assert (rows["16384"]["ratio"], rows["16384"]["logit_diff_max"]) == (0.05, 0.25)
    assert rows["16384"]["same_token"]
    assert ttft.figures_of(rows, ttft.FULL) == {
        "ttft_16k_ratio": 0.05,
        "ttft_logit_diff_max": 0.25,
    }


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
