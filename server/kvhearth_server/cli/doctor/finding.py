"""What a check of ``kvhearth doctor`` looks at, and what it says.

``fail`` is what keeps the daemon from starting with these settings, ``warn`` what costs speed or a
feature.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from pathlib import Path

from kvhearth_server.cli.doctor.machine import Machine
from kvhearth_server.config.load import Settings


class Grade(enum.StrEnum):
    """How bad a finding is."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class Finding:
    """One line of the report; ``fix`` is a command or a setting, empty where there is nothing to
    do.
    """

    check: str
    grade: Grade
    found: str
    fix: str = ""


@dataclass(frozen=True)
class Look:
    """What is looked at: a machine, for a daemon with these settings.

    Args:
        folder: where direct IO is tried.
    """

    machine: Machine
    settings: Settings
    folder: Path


def graded(good: object, check: str, found: str, fix: str, bad: Grade = Grade.WARN) -> Finding:
    """``found`` is ok if it is ``good``, else ``bad`` with its fix."""
    return Finding(check, Grade.OK, found) if good else Finding(check, bad, found, fix)
