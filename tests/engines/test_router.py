"""The example of a router, between two engines on daemons of their own."""

from __future__ import annotations

import contextlib
import json
import subprocess
from pathlib import Path

from engines.harness import PYTHON, ROOT, connector
from engines.kit import BLOCK_TOKENS, wait_attached
from engines.serving import NAME, running_server, served
from support.daemon import running_daemon


def test_prefixes_are_found_where_they_are(tmp_path: Path, logs: Path) -> None:
    words = [str(PYTHON), str(ROOT / "deploy/examples/router/router.py"), "--json"]
    words += ["--model", NAME, "--block-tokens", str(BLOCK_TOKENS)]
    with contextlib.ExitStack() as stack:
        for number in range(2):
            daemon = stack.enter_context(running_daemon(memory="256MiB"))
            endpoint = f"ipc://{tmp_path}/events{number}"
            publish = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": endpoint}
            options = served(daemon, connector(daemon), kv_events_config=publish)
            server = stack.enter_context(running_server(logs, **options))
            wait_attached(daemon)
            words += ["--engine", f"http://127.0.0.1:{server.port}", endpoint]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout)
    assert found["prefix"]["hit_rate"] > found["round_robin"]["hit_rate"] > 0
