"""A hub of models on this machine, as far as its client library asks one: revisions, lists of
files, and files.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

COMMIT = "89abcdef0123456789abcdef0123456789abcdef"


class _Handler(BaseHTTPRequestHandler):
    """Serves one folder as the model of every name, whose branches are all at ``COMMIT``."""

    protocol_version = "HTTP/1.1"
    folder: Path

    def do_HEAD(self) -> None:
        """Answer the question for a file's size and tag."""
        self.do_GET()

    def do_GET(self) -> None:
        """Answer with a file, or with what there is."""
        parts = urlsplit(self.path).path.strip("/").split("/")
        files = sorted(path for path in self.folder.iterdir() if path.is_file())
        if parts[:2] == ["api", "models"] and "tree" in parts:
            tree = [
                {"type": "file", "path": path.name, "size": path.stat().st_size, "oid": _tag(path)}
                for path in files
            ]
            self._reply(200, json.dumps(tree).encode())
        elif parts[:2] == ["api", "models"] and len(parts) >= 4:
            names = [{"rfilename": path.name} for path in files]
            found = {"id": "/".join(parts[2:4]), "sha": COMMIT, "siblings": names}
            self._reply(200, json.dumps(found).encode())
        elif len(parts) == 5 and parts[2] == "resolve" and (self.folder / parts[4]) in files:
            path = self.folder / parts[4]
            self._reply(200, path.read_bytes(), {"ETag": f'"{_tag(path)}"'})
        else:
            self._reply(404, b"", {"X-Error-Code": "EntryNotFound"})

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""

    def _reply(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"X-Repo-Commit": COMMIT, **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


def _tag(path: Path) -> str:
    return hashlib.sha1(path.read_bytes(), usedforsecurity=False).hexdigest()


@contextlib.contextmanager
def running_hub(folder: Path, cache: Path) -> Iterator[dict[str, str]]:
    """Serve a model's folder; yields the environment of programs that load it from there.

    Args:
        cache: where they keep what they have loaded.
    """
    handler = type("Handler", (_Handler,), {"folder": folder})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        endpoint = f"http://127.0.0.1:{server.server_port}"
        yield {"HF_ENDPOINT": endpoint, "HF_HUB_OFFLINE": "0", "HF_HOME": str(cache)}
        server.shutdown()
        thread.join()
