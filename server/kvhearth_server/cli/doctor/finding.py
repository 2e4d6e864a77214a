"""Inputs and findings of the checks of ``kvhearth doctor``.

``fail`` keeps the daemon from starting with these settings; ``warn`` costs speed or a feature.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from pathlib import Path

from kvhearth_server.cli.doctor.machine import Machine
from kvhearth_server.config.load import Settings


class Grade(enum.StrEnum):
    """Severity of a finding."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class Finding:
    """One line of the report; ``fix`` is a command or a setting, empty if nothing needs fixing."""

    check: str
    grade: Grade
    found: str
    fix: str = ""


@dataclass(frozen=True)
class Look:
    """Input of the checks: a machine, for a daemon with these settings.

    Args:
        folder: directory in which direct IO is tried.
    """

    machine: Machine
    settings: Settings
    folder: Path


def graded(good: object, check: str, found: str, fix: str, bad: Grade = Grade.WARN) -> Finding:
    """Return a finding of ``found``: ok if ``good``, else ``bad`` with its fix."""
    return Finding(check, Grade.OK, found) if good else Finding(check, bad, found, fix)
