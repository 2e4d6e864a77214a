"""All faults, by name."""

from __future__ import annotations

from collections.abc import Mapping

from kvhearth_server.torture.faults.base import Fault
from kvhearth_server.torture.faults.catalogues import CATALOGUES
from kvhearth_server.torture.faults.drives import DRIVES
from kvhearth_server.torture.faults.files import FILES
from kvhearth_server.torture.faults.lines import LINES
from kvhearth_server.torture.faults.points import POINTS
from kvhearth_server.torture.faults.processes import PROCESSES

__all__ = ["TABLE", "Fault"]

TABLE: Mapping[str, Fault] = {
    fault.name: fault for fault in (*PROCESSES, *POINTS, *FILES, *CATALOGUES, *DRIVES, *LINES)
}
