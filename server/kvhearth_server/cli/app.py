"""The entry point of ``kvhearth``: builds the command from its verbs, turns errors into exit codes.

Nothing outside the standard library is imported at the top: an engine's environment gets this entry
point too, and without the server extra it has to say so; and ``kvhearth health`` ends before
anything else is imported.
"""

from __future__ import annotations

import atexit
import io
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import NoReturn

    import typer

    from kvhearth.errors import KVHearthError
    from kvhearth_server.tier_startup import OpenTiers

EXIT_CONFIG = 2
EXIT_MEMORY = 3
EXIT_OTHER = 1

EXIT_CODES = {
    "config_invalid": EXIT_CONFIG,
    "memory_unavailable": EXIT_MEMORY,
    "hugepages_unavailable": EXIT_MEMORY,
    "arena_busy": EXIT_MEMORY,
    "arena_unusable": EXIT_MEMORY,
    "ssd_unusable": EXIT_MEMORY,
}
"""Exit codes of the process by a ``Reason``'s word; every other reason is ``EXIT_OTHER``."""

EPILOG = """Examples: kvhearth doctor; kvhearth serve --memory 64GiB; kvhearth top

Exit codes:
0  done
1  refused, daemon not reachable, or the checked condition does not hold
2  wrong usage or invalid setting
3  no memory, no huge pages, or unusable arena or SSD directories

Completion for bash, zsh and fish: kvhearth --install-completion"""
TOKEN_EPILOG = "Example: kvhearth token ls --tokens-file /etc/kvhearth/tokens.yaml"
CONFIG_EPILOG = "Example: kvhearth config sample > kvhearth.yaml"

VERBS_GROUP = "kvhearth.verbs"
"""Entry points that add a verb to the command: functions of the ``typer.Typer``."""
LAB_VERBS = ("bench", "hostile", "torture")
"""Verbs of the distribution ``kvhearth-lab``."""

SERVER_EXTRA = frozenset(
    {
        "fastapi",
        "grpc_health",
        "grpc_reflection",
        "prometheus_client",
        "pydantic",
        "pydantic_settings",
        "rich",
        "structlog",
        "starlette",
        "typer",
        "uvicorn",
        "yaml",
    }
)
"""Import names that the server extra brings."""


def build() -> typer.Typer:
    """Build the command with all its verbs.

    Raises:
        ImportError: the server extra is not installed.
    """
    import typer

    from kvhearth_server.cli import (
        admin,
        config,
        doctor,
        gateway,
        init,
        mrc,
        panels,
        serve,
        show,
        sizing,
        stats,
        tokens,
        top,
    )

    app = typer.Typer(
        name="kvhearth",
        help="Keeps the KV cache of LLM inference engines warm.",
        epilog=EPILOG,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(show.option)
    app.command("init", epilog=init.EPILOG)(init.init)
    app.command("serve", cls=panels.PanelCommand, epilog=serve.EPILOG)(serve.serve)
    app.command("gateway", epilog=gateway.EPILOG)(gateway.gateway)
    settings = typer.Typer(
        help="Check and show, sample or reload settings.",
        epilog=CONFIG_EPILOG,
        no_args_is_help=True,
    )
    settings.command("show", epilog=config.SHOW_EPILOG)(config.show)
    settings.command("sample", epilog=config.SAMPLE_EPILOG)(config.sample)
    settings.command("reload", epilog=config.RELOAD_EPILOG)(config.reload)
    app.add_typer(settings, name="config")
    identities = typer.Typer(
        help="Make or list tokens of engines on other hosts.",
        epilog=TOKEN_EPILOG,
        no_args_is_help=True,
    )
    identities.command("new", epilog=tokens.NEW_EPILOG)(tokens.new)
    identities.command("ls", epilog=tokens.LS_EPILOG)(tokens.ls)
    app.add_typer(identities, name="token")
    app.command("size", epilog=sizing.EPILOG)(sizing.sized)
    _add_remotes(app)
    app.command("doctor", cls=panels.PanelCommand, epilog=doctor.EPILOG)(doctor.doctor)
    app.command("health", epilog=stats.HEALTH_EPILOG)(stats.health)
    app.command("stat", epilog=stats.STAT_EPILOG)(stats.stat)
    app.command("top", epilog=top.TOP_EPILOG)(top.top)
    app.command("events", epilog=top.EVENTS_EPILOG)(top.events)
    app.command("mrc", epilog=mrc.EPILOG)(mrc.mrc)
    app.command("ls", epilog=show.LS_EPILOG)(show.ls)
    app.command("sessions", epilog=show.SESSIONS_EPILOG)(show.sessions)
    app.command("leases", epilog=show.LEASES_EPILOG)(show.leases)
    app.command("explain", epilog=show.EXPLAIN_EPILOG)(show.explain)
    app.command("evict", epilog=admin.EVICT_EPILOG)(admin.evict)
    app.command("forget", epilog=admin.FORGET_EPILOG)(admin.forget)
    app.command("drain", epilog=admin.DRAIN_EPILOG)(admin.drain)
    _add_verbs(app)
    return app


def _add_remotes(app: typer.Typer) -> None:
    import typer

    from kvhearth_server.cli import remote

    remotes = typer.Typer(
        help="Make a fleet's key; show or remove what a remote tier holds.",
        epilog=remote.USAGE_EPILOG,
        no_args_is_help=True,
    )
    remotes.command("init-key", epilog=remote.INIT_KEY_EPILOG)(remote.init_key)
    remotes.command("usage", epilog=remote.USAGE_EPILOG)(remote.usage)
    remotes.command("sweep", epilog=remote.SWEEP_EPILOG)(remote.sweep)
    remotes.command("purge", epilog=remote.PURGE_EPILOG)(remote.purge)
    app.add_typer(remotes, name="remote")


def _add_verbs(app: typer.Typer) -> None:
    """Add the verbs of other distributions; a missing one of the lab's says what to install."""
    from importlib import metadata

    found = {each.name: each for each in metadata.entry_points(group=VERBS_GROUP)}
    for name in sorted({*found, *LAB_VERBS}):
        if name in found:
            found[name].load()(app)
        else:
            _add_missing(app, name)


def _add_missing(app: typer.Typer, name: str) -> None:
    """Add a hidden verb that takes any words and says what to install."""
    from kvhearth.errors import KVHearthError, Reason

    def missing() -> None:
        message = f"kvhearth {name} needs the lab: pip install 'kvhearth[lab]'"
        raise KVHearthError(Reason.CONFIG_INVALID, message)

    loose = {"ignore_unknown_options": True, "allow_extra_args": True}
    app.command(name, hidden=True, add_help_option=False, context_settings=loose)(missing)


def exit_code(error: KVHearthError) -> int:
    """Return the exit code of the process after ``error``."""
    return EXIT_CODES.get(error.reason, EXIT_OTHER)


def run(args: Sequence[str] | None = None, opener: OpenTiers | None = None) -> int:
    """Run the command and return its exit code; a bug's exception passes (Python's exit code is 1).

    Args:
        args: the words after ``kvhearth``; by default those of this process.
        opener: opens the tiers of ``serve``; by default those that the settings ask for.
    """
    words = sys.argv[1:] if args is None else list(args)
    if words[:1] == ["health"]:
        from kvhearth_server.cli import liveness

        code = liveness.main(words[1:])
        if code is not None:
            return code
    from kvhearth.errors import KVHearthError

    try:
        build()(args=None if args is None else list(args), prog_name="kvhearth", obj=opener)
    except KVHearthError as error:
        print(f"kvhearth: error: {error.message}", file=sys.stderr)  # noqa: T201 - no log yet
        return exit_code(error)
    except ImportError as error:
        if (error.name or "").partition(".")[0] not in SERVER_EXTRA:
            raise
        message = "kvhearth needs the server extra: pip install 'kvhearth[server]'"
        print(message, file=sys.stderr)  # noqa: T201 - there is nothing to log with
        return EXIT_CONFIG
    except SystemExit as ended:  # typer always ends this way, with usage errors as 2
        return ended.code if isinstance(ended.code, int) else EXIT_OTHER
    return 0


def main(opener: OpenTiers | None = None) -> None:
    """Run the console script."""
    _use_utf8()
    # Per-slot arrays are sparse: with transparent huge pages under them, a slab's few rows would
    # make 2 MiB of each resident. Must be set before numpy is imported.
    os.environ.setdefault("NUMPY_MADVISE_HUGEPAGE", "0")
    _end(run(opener=opener))


def _use_utf8() -> None:
    """Start anew in Python's UTF-8 mode where the locale has another encoding.

    Paths are UTF-8 for gRPC, in files and in the log. With a locale's ASCII half of them would be
    escapes that nothing can write.
    """
    if sys.getfilesystemencoding() != "utf-8" and os.environ.get("PYTHONUTF8") != "1":
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _end(code: int) -> NoReturn:
    """End the process with ``code`` once all output is written.

    The interpreter and the libraries under it are not torn down. gRPC cleans up on threads that
    cannot be joined; one that still runs while its memory goes would crash a command, or a
    container's health check, that has done its work.
    """
    atexit._run_exitfuncs()
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
        except OSError:
            code = code or EXIT_OTHER
    os._exit(code)


if __name__ == "__main__":
    main()
