"""Other caches' files on the same drive, beside ours."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvhearth_server.bench.ssd.sizes import Sizes


def peers_part(
    folder: Path, sizes: Sizes, interface: str, given: Mapping[str, Path | None]
) -> dict[str, Any]:
    return {"peers": {}, "skipped": {}}
