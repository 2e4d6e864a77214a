"""A real browser without a window: Debian's Chromium, driven by its debugging protocol on pipes."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import pytest

from kvhearth_lab.harness import HUNG_S

NAMES = ("chromium-headless-shell", "chromium")


class Browser:
    """One tab. ``said`` are what the page's console and content policy complained about."""

    def __init__(self, process: subprocess.Popen[bytes], to_browser: int, answers: int) -> None:
        self._process = process
        self._to_browser = to_browser
        self._answers = answers
        self._rest = b""
        self._number = 0
        self._session = ""
        self.said: list[str] = []
        target = self.command("Target.createTarget", url="about:blank")["targetId"]
        attached = self.command("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.command(f"{domain}.enable")

    def command(self, method: str, **parameters: Any) -> Any:
        """Send a command and return its result; fails if the browser refuses it."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to_browser, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + HUNG_S
        while True:
            found = self._message(end)
            if found.get("id") == self._number:
                assert "error" not in found, (method, found["error"])
                return found["result"]
            self._note(found)

    def _message(self, end: float) -> Any:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._answers], [], [], max(0.0, end - time.monotonic()))
            assert ready, "the browser does not answer"
            data = os.read(self._answers, 1 << 20)
            assert data, "the browser ended"
            self._rest += data
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def _note(self, event: Any) -> None:
        if event.get("method") == "Log.entryAdded":
            self.said.append(event["params"]["entry"]["text"])
        elif event.get("method") == "Runtime.exceptionThrown":
            self.said.append(json.dumps(event["params"]["exceptionDetails"]))

    def look(self, width: int, height: int, scheme: str = "light") -> None:
        """Set the window's size in pixels, and the colours that its user prefers."""
        self.command(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        wanted = [{"name": "prefers-color-scheme", "value": scheme}]
        self.command("Emulation.setEmulatedMedia", features=wanted)

    def open(self, url: str) -> None:
        """Go to a page."""
        assert not self.command("Page.navigate", url=url).get("errorText")

    def run(self, script: str) -> Any:
        """Return the value of an expression in the page; a promise is waited for."""
        found = self.command(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def text(self, selector: str) -> str:
        """Return the text of an element as it is shown; "" before it is there."""
        return str(self.run(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''"))

    def press(self, key: str) -> None:
        """Press and release a key, such as Tab."""
        for kind in ("keyDown", "keyUp"):
            code = {"Tab": 9, "Enter": 13}[key]
            text = {"text": "\r"} if (key, kind) == ("Enter", "keyDown") else {}
            named = {"key": key, "code": key, "windowsVirtualKeyCode": code, **text}
            self.command("Input.dispatchKeyEvent", type=kind, **named)


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    """Start a browser; the test is skipped where there is none."""
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.skip("no Chromium is there (Debian packages chromium-headless-shell, chromium)")
    folder = tempfile.mkdtemp(prefix="kvh-browser-")
    commands, to_browser = os.pipe()
    answers, from_browser = os.pipe()
    flags = (
        *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
        *("--no-first-run", "--remote-debugging-pipe", f"--user-data-dir={folder}"),
        "--hide-scrollbars",
    )
    process = subprocess.Popen(
        ["bash", "-c", f'exec "$@" 3<&{commands} 4>&{from_browser}', "-", program, *flags],
        pass_fds=(commands, from_browser),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(commands)
    os.close(from_browser)
    try:
        yield Browser(process, to_browser, answers)
    finally:
        os.close(to_browser)
        os.close(answers)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(HUNG_S)
        process.kill()
        process.wait()
        shutil.rmtree(folder, ignore_errors=True)
