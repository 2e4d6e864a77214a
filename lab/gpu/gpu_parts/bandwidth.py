"""Part e: bandwidth; the measurement is that of ``kvhearth bench gpu``."""

from __future__ import annotations

from gpu_parts.common import Report, merge, run_part
from kvhearth_lab.bench.gpu import bandwidth
from kvhearth_lab.bench.gpu.stage import AUTO, Stage, copy_methods


def measure(report: Report, stage: Stage) -> None:
    """Measure the matrix while time is left."""
    sizes = bandwidth.REHEARSAL if stage.small else bandwidth.FULL
    found = bandwidth.measure(
        stage, sizes, report.left_s, lambda so_far: merge(report, dict(so_far))
    )
    merge(report, found)
    report.check("every layout with a target was measured", bool(found["figures"]), found)
    # A machine may lack a method; the copier's own choice must always work.
    own = copy_methods()[0] if stage.real else AUTO
    for name, reason in found["unmeasured"].items():
        report.check("cells are measured", not name.endswith(own), f"{name}: {reason}")
    if found["left_out"]:
        report.shorten(f"{found['left_out']} cells of the matrix were not measured")


if __name__ == "__main__":
    run_part(measure)
