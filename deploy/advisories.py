"""Checks a lock against known advisories: ``advisories.py LOCK [--allow-offline]``.

pip-audit asks PyPI's service. Where that is not reached, or does not know a package, pip-audit
passes the package over and reports no vulnerability; here it counts as not checked. Exit status: 0
all checked and no advisory, 1 an advisory, 3 something was not checked, unless ``--allow-offline``
says that this is expected.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TIMEOUT_S = 300
FOUND, UNCHECKED = 1, 3


@dataclass(frozen=True)
class Verdict:
    """Packages with their advisories, packages that were not checked, and how many were."""

    found: dict[str, list[str]]
    unchecked: list[str]
    checked: int


def verdict_of(report: dict[str, Any]) -> Verdict:
    """Return the verdict of pip-audit's JSON report."""
    found, unchecked, checked = dict[str, list[str]](), list[str](), 0
    for each in report["dependencies"]:
        if "skip_reason" in each:
            unchecked.append(each["name"])
            continue
        checked += 1
        if each["vulns"]:
            found[f"{each['name']} {each['version']}"] = [one["id"] for one in each["vulns"]]
    return Verdict(found, unchecked, checked)


def audit(lock: Path) -> Verdict | str:
    """Return the verdict about a lock, or why there is none."""
    words = [sys.executable, "-m", "pip_audit", "--require-hashes", "--disable-pip"]
    words += ["--progress-spinner", "off", "--format", "json", "--requirement", str(lock)]
    try:
        done = subprocess.run(
            words, capture_output=True, encoding="utf-8", timeout=TIMEOUT_S, check=False
        )
        return verdict_of(json.loads(done.stdout))
    except subprocess.TimeoutExpired:
        return f"no answer within {TIMEOUT_S} s"
    except (ValueError, KeyError, TypeError):
        return f"pip-audit ended with {done.returncode} and no report"


def main() -> int:
    """Check the lock, say the verdict, and return the exit status."""
    parser = argparse.ArgumentParser(description="Check a lock against known advisories.")
    parser.add_argument("lock", type=Path)
    parser.add_argument("--allow-offline", action="store_true", help="Exit with 0 if not checked.")
    given = parser.parse_args()
    verdict = audit(given.lock)
    if isinstance(verdict, str):
        verdict, message = Verdict({}, ["all"], 0), f" ({verdict})"
    else:
        message = ""
    for package, ids in sorted(verdict.found.items()):
        sys.stdout.write(f"{package}: {', '.join(ids)}\n")
    if verdict.unchecked:
        sys.stdout.write(
            f"NOT CHECKED{message}: {', '.join(sorted(verdict.unchecked))}. The service that has "
            "the advisories was not reached, or does not know them.\n"
        )
    sys.stdout.write(f"{verdict.checked} checked, {len(verdict.found)} with advisories\n")
    if verdict.found:
        return FOUND
    return UNCHECKED if verdict.unchecked and not given.allow_offline else 0


if __name__ == "__main__":
    sys.exit(main())
