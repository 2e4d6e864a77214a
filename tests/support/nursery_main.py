"""A process that has everything imported and forks children on demand (see ``nursery``).

It has no thread of its own and never calls gRPC, so its children may use both.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import random
import signal
import socket
import sys
import traceback

MESSAGE_BYTES_MAX = 1 << 16
FILES_MAX = 8
_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Serve birth and burial requests on the socket whose number is the first argument. The other
    arguments are modules to import first, or functions to call.
    """
    for name in sys.argv[2:]:
        module, _, function = name.partition(":")
        found = importlib.import_module(module)
        if function:
            getattr(found, function)()
    control = socket.socket(fileno=int(sys.argv[1]))
    while True:
        message, numbers, _, _ = socket.recv_fds(control, MESSAGE_BYTES_MAX, FILES_MAX)
        if not message:
            return
        request = json.loads(message)
        if "bury" in request:
            _, status = os.waitpid(request["bury"], 0)
            answer = {"status": os.waitstatus_to_exitcode(status)}
        else:
            pid = os.fork()
            if pid == 0:
                control.close()
                _live(request, numbers)
            answer = {"pid": pid}
        for number in numbers:
            os.close(number)
        control.sendall(json.dumps(answer).encode())


def _live(request: dict[str, object], numbers: list[int]) -> None:
    """Run a child; does not return."""
    # The parent's loop must not continue in the child, whatever happens here.
    status = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        random.seed()
        module, _, function = str(request["run"]).partition(":")
        arguments = request["arguments"]
        assert isinstance(arguments, dict)
        found = getattr(importlib.import_module(module), function)
        status = found(*numbers, **arguments) or 0
    except BaseException:  # noqa: BLE001 - a process's main: told, and the end
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError):
            sys.stderr.flush()
        os._exit(status)


def one_command() -> None:
    """Build the command once for all children; it takes longer than the rest of a start."""
    import typer.main

    from kvhearth_server.cli import app

    built = typer.main.get_command(app.build())
    app.build = lambda: built  # type: ignore[assignment,return-value]


def serve_daemon(
    log: int,
    arguments: list[str],
    environment: dict[str, str],
    fresh_s: float,
) -> int:
    """Run ``kvhearth serve`` as the command line does.

    Args:
        fresh_s: age up to which renderings are shared.
    """
    from kvhearth import failpoints as faults
    from kvhearth_server.cli.app import run
    from kvhearth_server.observability import exposition

    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(environment)
    exposition.FRESH_S = fresh_s
    faults.arm(os.environ.get(faults.ENVIRONMENT_NAME))
    return run(["serve", *arguments])


if __name__ == "__main__":
    main()
