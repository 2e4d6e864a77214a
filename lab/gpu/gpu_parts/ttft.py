"""Part h: time to the first token; the measurement is that of ``kvhearth bench gpu``."""

from __future__ import annotations

from gpu_parts.common import Report, merge, run_part
from kvhearth_lab.bench.gpu import ttft
from kvhearth_lab.bench.gpu.stage import Stage


def measure(report: Report, stage: Stage) -> None:
    """Measure on transformers' model, or plain torch's where it is not installed. A rehearsal runs
    the latter, which starts faster.
    """
    sizes = ttft.REHEARSAL if stage.small else ttft.FULL
    found = ttft.measure(
        stage,
        sizes,
        report.left_s,
        lambda so_far: merge(report, so_far),
        plain=stage.small,
    )
    merge(report, found)
    for tokens, row in found["rows"].items():
        name = "loaded and computed KV give the same token"
        report.check(name, row["same_token"], f"{tokens} tokens: {row}")
    report.check("a prompt was measured", bool(found["rows"]), found)
    if len(found["rows"]) < len(sizes.prompt_tokens):
        report.shorten(f"only prompts of {', '.join(found['rows'])} tokens were measured")


if __name__ == "__main__":
    run_part(measure)
