"""Options that several verbs take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

AsJson = Annotated[
    bool, typer.Option("--json", help="Print one JSON object with stable names on stdout.")
]
SocketDir = Annotated[
    Path | None,
    typer.Option(
        "--socket-dir",
        envvar="KVHEARTH_SOCKET_DIR",
        help="The daemon's directory of sockets. Default: as the daemon's settings say.",
        metavar="DIR",
        show_default=False,
    ),
]
Config = Annotated[
    Path | None,
    typer.Option(
        "--config",
        help="YAML file of settings (environment: KVHEARTH_CONFIG).",
        metavar="FILE",
        show_default=False,
    ),
]
