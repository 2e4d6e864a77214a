"""Table of all faults, by name."""

from __future__ import annotations

from collections.abc import Mapping

from kvhearth_lab.torture.faults.base import Fault
from kvhearth_lab.torture.faults.connections import LINES
from kvhearth_lab.torture.faults.daemon import POINTS, PROCESSES
from kvhearth_lab.torture.faults.drives import DRIVES
from kvhearth_lab.torture.faults.files import CATALOGUES, FILES
from kvhearth_lab.torture.faults.gateway import GATEWAYS
from kvhearth_lab.torture.faults.remotes import REMOTES

__all__ = ["TABLE", "Fault"]

TABLE: Mapping[str, Fault] = {
    fault.name: fault
    for fault in (*PROCESSES, *POINTS, *FILES, *CATALOGUES, *DRIVES, *LINES, *GATEWAYS, *REMOTES)
}
