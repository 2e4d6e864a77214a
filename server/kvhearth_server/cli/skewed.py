"""``kvhearth`` with clocks that follow a file; no verb.

``kvhearth torture`` starts daemons whose clocks are to jump by
``python -m kvhearth_server.cli.skewed FILE serve ...``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from kvhearth_server.torture.clock import follow


def main(words: Sequence[str]) -> int:
    """Follow the file, then be ``kvhearth`` with the words that are left."""
    follow(Path(words[0]))
    os.environ.setdefault("NUMPY_MADVISE_HUGEPAGE", "0")
    from kvhearth_server.cli.app import run

    return run(words[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
