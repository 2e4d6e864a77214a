"""``kvhearth serve``: runs the daemon."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import typer

from kvhearth.version import __version__
from kvhearth_server.cli.config import with_flags
from kvhearth_server.cli.output import Config
from kvhearth_server.config.load import Settings, load_settings, unread_environment
from kvhearth_server.config.value_types import format_size
from kvhearth_server.observability import logs
from kvhearth_server.transport.reports import Finding


def prepare(config: Path | None, flags: Mapping[str, object]) -> Settings:
    """Load the settings of this start, and set up logging by them.

    Args:
        config: the YAML file, if one was named.
        flags: those given, by field name.

    Raises:
        KVHearthError: ``CONFIG_INVALID``.
    """
    settings = load_settings(flags, config)
    logs.configure(settings.log_level, settings.log_format)
    logs.capture()
    log = logs.get_logger("kvhearth.serve")
    log.info(
        "daemon.starting",
        version=__version__,
        pid=os.getpid(),
        memory=format_size(settings.memory),
        ssd_dirs=len(settings.ssd_dirs),
    )
    log.debug("daemon.settings", **settings.model_dump(mode="json"))
    for name, asked, used in settings.rounded():
        log.info("memory.rounded", of=name, asked_bytes=asked, used_bytes=used)
    for name in unread_environment():
        log.warning("environment.unread", variable=name)
    return settings


@with_flags()
def serve(context: typer.Context, config: Config = None, **flags: object) -> None:
    """Run the daemon in the foreground until SIGTERM or SIGINT.

    A flag overrides the environment, which overrides the YAML file, which
    overrides the default: --slab-bytes is KVHEARTH_SLAB_BYTES in the
    environment and slab_bytes in the file. Sizes are written 65536, 512MiB,
    64Gi or 64GiB (1024s), 64G or 64GB (1000s); durations 0.5, 500ms, 30s or
    24h.
    """
    settings = prepare(config, flags)
    # Imported after the settings, so that a mistake in them is reported without the time to load
    # gRPC.
    from kvhearth_server import daemon

    def again() -> Settings:
        return load_settings(flags, config)

    def examine() -> list[Finding]:
        from kvhearth_server.cli import doctor

        return doctor.worse_than_ok(settings)

    raise typer.Exit(daemon.run(settings, opener=context.obj, again=again, examine=examine))
