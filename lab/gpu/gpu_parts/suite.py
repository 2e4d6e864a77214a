"""Further part: pytest's own tests of the CUDA copier, and the copiers' contract, on the device."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from gpu_parts.common import Report, run_part
from kvhearth_lab.bench.gpu.stage import Stage

ROOT = Path(__file__).resolve().parents[3]
FILES = ("lab/gpu/test_cuda_copier.py", "tests/contract/test_copier_contract.py")
OPTIONS = ("-q", "-x", "--tb=short", "-m", "gpu", "--import-mode=importlib")
# The project's own settings and fixtures need plugins that a bare machine lacks.
BARE = ("-c", "/dev/null", "--noconftest", "-p", "no:cacheprovider")
COUNTS = re.compile(r"(\d+) (passed|failed|errors?|skipped)")


def measure(report: Report, stage: Stage) -> None:
    """Run the tests; without a device all of them skip."""
    command = [sys.executable, "-m", "pytest", *BARE, *OPTIONS]
    command += ["--rootdir", str(ROOT), *(str(ROOT / name) for name in FILES)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=max(report.left_s(), 1.0), check=False
        )
    except subprocess.TimeoutExpired as late:
        output = late.stdout or b""
        report.put(output=output.decode(errors="replace")[-2000:])
        report.shorten("pytest was not done in its time")
        return
    counts = {word: int(number) for number, word in COUNTS.findall(done.stdout[-400:])}
    report.put(counts=counts, output=done.stdout[-2000:] + done.stderr[-500:])
    report.check("pytest passes", done.returncode == 0, done.stdout[-400:])
    word = "passed" if stage.real else "skipped"
    report.check(f"tests have {word}", counts.get(word, 0) > 0, counts)


if __name__ == "__main__":
    run_part(measure)
