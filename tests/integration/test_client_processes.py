"""Behaviour visible only from outside: imports, forks and process exit."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

from support.attached import url_of
from support.daemon import until
from support.fake_daemon import running, small_contract

from kvhearth_lab.harness import HUNG_S

TESTS = Path(__file__).resolve().parents[1]


def run(script: str, *arguments: str) -> str:
    """Runs a script, which must succeed with an empty stderr; returns its output."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(script), *arguments],
        capture_output=True,
        text=True,
        timeout=HUNG_S,
        check=False,
        env={**os.environ, "PYTHONPATH": str(TESTS)},
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_it_imports_nothing_heavy_and_fails_open(tmp_path: Path) -> None:
    output = run(
        """
        import sys
        import kvhearth
        assert "grpc" not in sys.modules
        from kvhearth import Contract, GroupKind, GroupSpec, connect
        import logging
        logging.getLogger("kvhearth").addHandler(logging.NullHandler())
        contract = Contract("m", "r", "uint8", (GroupSpec(GroupKind.FULL, 16, 4096),))
        client = connect(sys.argv[1], contract, engine_id="e")
        for _ in range(200):
            result = client.lookup({0: [b"k" * 32]})
            assert result.reason == "daemon_away" and not result.groups[0].present.any()
        client.close()
        heavy = {"torch", "fastapi", "prometheus_client", "pydantic", "kvhearth_server"}
        print(sorted(heavy & set(sys.modules)))
        """,
        url_of(tmp_path / "nowhere"),
    )
    assert output == "[]\n"


FORK = """
    import os, signal, sys, logging
    from kvhearth import connect
    from support.fake_daemon import key, small_contract
    logging.getLogger("kvhearth").addHandler(logging.NullHandler())

    client = connect(sys.argv[1], small_contract(), engine_id="parent")
    assert client.wait_ready(10)
    assert client.lookup({0: [key(1)]}).reason == ""
    arena = client.arena
    child = os.fork()
    if child == 0:
        signal.alarm(50)
        status = 1
        try:
            for _ in range(3):
                assert client.lookup({0: [key(1)]}).reason == "closed"
            assert client.reserve({0: 1}).reason == "closed"
            client.release(None)
            assert (client.arena, client.boot_id, client.counters()) == (None, "", {})
            assert not client.wait_ready(5)
            assert not arena.alive()
            del arena
            assert client.close()
            anew = connect(sys.argv[1], small_contract(), engine_id="child", rank=1)
            # gRPC may or may not survive a fork, but a child never hangs on it.
            ready = anew.wait_ready(20)
            assert anew.lookup({0: [key(1)]}).reason == ("" if ready else "daemon_away")
            os.write(1, b"child ready\\n" if ready else b"child without\\n")
            status = 0
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    assert status == 0, status
    assert client.lookup({0: [key(1)]}).reason == ""
    assert arena.alive()
    arena.view(1)[0] = 1
    del arena
    assert client.close()
"""


def test_a_forked_child_answers_closed_until_it_connects_anew(tmp_path: Path) -> None:
    with running(tmp_path, small_contract()) as daemon:
        said = run(FORK, url_of(tmp_path))
        assert said in ("child ready\n", "child without\n")
        assert daemon.hellos[0].pid != daemon.hellos[-1].pid
        # The parent says goodbye once; a child whose gRPC did not survive leaves its attach
        # sockets, too.
        assert daemon.byes == 1 or (said == "child without\n" and daemon.byes > 1)


def test_a_forked_child_does_not_hold_its_parents_life_line(tmp_path: Path) -> None:
    with running(tmp_path, small_contract()) as daemon:
        output = run(
            """
            import os, sys, time
            from kvhearth import connect
            from support.fake_daemon import small_contract
            client = connect(sys.argv[1], small_contract(), engine_id="parent")
            assert client.wait_ready(10)
            child = os.fork()
            if child == 0:
                os.close(1), os.close(2)
                time.sleep(30)
                os._exit(0)
            print(child, flush=True)
            os._exit(0)
            """,
            url_of(tmp_path),
        )
        try:
            until(lambda: daemon.ended == 1)
        finally:
            os.kill(int(output), 9)


def test_a_process_may_end_without_close(tmp_path: Path) -> None:
    with running(tmp_path, small_contract()) as daemon:
        run(
            """
            import sys
            from kvhearth import connect
            from support.fake_daemon import key, small_contract
            client = connect(sys.argv[1], small_contract(), engine_id="e")
            assert client.wait_ready(10)
            client.lookup({0: [key(1)]})
            sys.modules["__main__"].__dict__["kept"] = client
            """,
            url_of(tmp_path),
        )
        until(lambda: daemon.ended == 1)
        assert daemon.byes == 0
