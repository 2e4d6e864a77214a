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
    from collections.abc import Callable, Iterator, Sequence
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

VERBS_GROUP = "kvhearth.verbs"
"""Entry points that add a verb to the command: functions of the ``typer.Typer``."""
LAB_VERBS = ("bench", "hostile", "torture")
"""Verbs of the distribution ``kvhearth-lab``."""

GROUPS = {
    "config": ("Check and show, sample or reload settings.", "config sample > kvhearth.yaml"),
    "token": (
        "Make or list tokens of engines on other hosts.",
        "token ls --tokens-file /etc/kvhearth/tokens.yaml",
    ),
    "remote": (
        "Make a fleet's key; show or remove what a remote tier holds.",
        "remote usage --remote 's3://bucket/kv?region=eu-central-1'",
    ),
}
"""Groups of verbs: help and example."""


def _verbs() -> Iterator[tuple[str, Callable[..., None], str]]:
    """Yield the words of each verb, its function and an example."""
    from kvhearth_server.cli import config, doctor, gateway, init, remote, serve, sizing, top, verbs

    place = "--arena-dir /dev/hugepages/kvhearth"
    tokens = "--tokens-file /etc/kvhearth/tokens.yaml"
    tls = "--tls-cert cert.pem --tls-key key.pem --tokens-file tokens.yaml"
    key = "9f86d081884c7d659a2feaa0c55ad015"
    yield "init", init.init, "init; kvhearth init --system --memory 64GiB --dir /tmp/look"
    more = f"--hugepages=require {place} --socket-dir /run/kvhearth"
    yield "serve", serve.serve, f"serve --memory 64GiB {more}"
    more = f"--socket-dir /run/kvhearth {tls}"
    yield "gateway", gateway.gateway, f"gateway --listen 0.0.0.0:9461 {more}"
    yield "config show", config.show, "config show kvhearth.yaml"
    yield "config sample", config.sample, "config sample > kvhearth.yaml"
    yield "config reload", verbs.reload, "config reload"
    more = f"--bound held_bytes=64GiB {tokens}"
    yield "token new", gateway.new, f"token new --name rack7 --tenant a {more}"
    yield "token ls", gateway.ls, f"token ls {tokens}"
    yield "size", sizing.sized, "size --model config.json --conversations 500"
    yield "remote init-key", remote.init_key, "remote init-key /etc/kvhearth/fleet.key"
    yield "remote usage", remote.usage, GROUPS["remote"][1]
    more = "--remote file:///mnt/shared/kv"
    yield "remote sweep", remote.sweep, f"remote sweep --older-than 7d {more}"
    yield "remote purge", remote.purge, f"remote purge --yes {more}"
    yield "doctor", doctor.doctor, f"doctor --memory 64GiB {place}"
    yield "health", verbs.health, "health --wait 30 || echo 'not serving'"
    yield "stat", verbs.stat, "stat --json | jq .counters.hit_keys"
    yield "top", top.top, "top; kvhearth top --once --json"
    yield "events", top.events, "events; kvhearth events --json | jq -r .reason"
    yield "mrc", verbs.mrc, "mrc; kvhearth mrc --json | jq '.curves[0].memory'"
    yield "ls", verbs.ls, "ls 3f9c --json | jq .contract"
    yield "sessions", verbs.sessions, "sessions --json | jq '.sessions[].pid'"
    yield "leases", verbs.leases, "leases --json | jq '.groups[] | select(.oldest_s > 60)'"
    yield "pins", verbs.pins, "pins --json | jq '.pins[].session'"
    yield "explain", verbs.explain, f"explain contract.json; kvhearth explain {key}"
    yield "evict", verbs.evict, "evict 3f9c --keep 10GiB; kvhearth evict 3f9c --keep 0 --tier ssd"
    yield "unpin", verbs.unpin, "unpin 3f9c; kvhearth unpin --session agent-7"
    yield "forget", verbs.forget, "forget 3f9c; kvhearth forget 3f9c --yes --json | jq .epoch"
    yield "drain", verbs.drain, "drain --wait 60 && systemctl restart kvhearth"


def build() -> typer.Typer:
    """Build the command with all its verbs.

    Raises:
        ImportError: the server extra is not installed.
    """
    import typer

    from kvhearth_server.cli.config import PanelCommand
    from kvhearth_server.cli.verbs import option

    app = typer.Typer(
        name="kvhearth",
        help="Keeps the KV cache of LLM inference engines warm.",
        epilog=EPILOG,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(option)
    groups = {"": app}
    for name, (told, example) in GROUPS.items():
        epilog = f"Example: kvhearth {example}"
        groups[name] = typer.Typer(help=told, epilog=epilog, no_args_is_help=True)
        app.add_typer(groups[name], name=name)
    for words, function, example in _verbs():
        group, _, name = words.rpartition(" ")
        cls = PanelCommand if words in ("serve", "gateway", "doctor") else None
        groups[group].command(name, cls=cls, epilog=f"Example: kvhearth {example}")(function)
    _add_verbs(app)
    return app


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
        missing = (error.name or "kvhearth").partition(".")[0]
        if missing.startswith("kvhearth") or missing in sys.stdlib_module_names:
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
