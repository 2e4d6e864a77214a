"""``kvhearth`` that ends with its parent, and whose clocks may follow a file; no verb.

``kvhearth torture`` starts its daemons by
``python -m kvhearth_server.cli.skewed PARENT FILE serve ...``; FILE may be empty.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from kvhearth_server.torture.clock import follow
from kvhearth_server.torture.tied import end_with


def main(words: Sequence[str]) -> None:
    """Tie this process, follow the file, then be ``kvhearth`` with the words that are left."""
    end_with(int(words[0]))
    if words[1]:
        follow(Path(words[1]))
    from kvhearth_server.cli import app

    sys.argv[1:] = words[2:]
    app.main()


if __name__ == "__main__":
    main(sys.argv[1:])
