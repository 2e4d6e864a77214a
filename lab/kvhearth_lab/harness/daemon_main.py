"""``kvhearth`` that ends with its parent, and whose clocks and drives may follow files.

Started by ``python -m kvhearth_lab.harness.daemon_main PARENT FILE serve ...``. The clocks follow
FILE, which may be empty. The drives follow the file that ``KVHEARTH_DISK_FAULTS`` names.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from kvhearth_lab.harness.client_process import end_with
from kvhearth_lab.harness.faults import commanded, follow


def main(words: Sequence[str]) -> None:
    """Tie this process to its parent, follow the file, then run ``kvhearth`` with the remaining
    words.
    """
    end_with(int(words[0]))
    if words[1]:
        follow(Path(words[1]))
    from kvhearth_server.cli import app
    from kvhearth_server.tier_startup import open_tiers

    sys.argv[1:] = words[2:]
    commander = commanded()
    app.main(partial(open_tiers, environment=commander.environment()) if commander else None)


if __name__ == "__main__":
    main(sys.argv[1:])
