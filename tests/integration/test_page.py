"""The page in a real browser, against a live daemon under load and across its restart."""

from __future__ import annotations

import contextlib
import json
import os
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.browser import Browser, browser
from support.daemon import Daemon, free_port, running_daemon, until
from support.http_door import ask
from support.raw_door import new_keys

from kvhearth_lab.harness.engine import contract_of, engine_of
from kvhearth_server.transport.web.page import VIEWERS_MAX

PICTURES = os.environ.get("KVHEARTH_TEST_PICTURES", "")
"""Directory for pictures of the page; empty for none."""
PAGE_BYTES_MAX = 80 << 10
BUSY_S = float(os.environ.get("KVHEARTH_TEST_PICTURE_S", "3"))
MODELS = {"Qwen3-8B": 64 << 10, "Llama-3.1-70B": 256 << 10}


@pytest.fixture(scope="module")
def tab() -> Iterator[Browser]:
    with browser() as found:
        yield found


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    settings = {
        "http": f"127.0.0.1:{free_port()}",
        "memory": "64MiB",
        "ssd_dir": f"{tmp_path}/ssd=512MiB",
        "namespace_quota": "48MiB",
    }
    with running_daemon(command=True, **settings) as found:
        yield found


@contextlib.contextmanager
def load(daemon: Daemon, model: str, page_bytes: int) -> Iterator[None]:
    """An engine that stores new prompts and reads older ones, the newest most often."""
    stop = threading.Event()

    def work() -> None:
        dice, keys = random.Random(page_bytes), list[bytes]()
        with engine_of(daemon.url(), contract_of(page_bytes, model=model), model.lower()) as engine:
            while not stop.wait(0.05):
                fresh = new_keys(8)
                engine.store(fresh)
                keys += fresh
                prompt = [keys[-1 - int(dice.paretovariate(0.7)) % len(keys)] for _ in range(6)]
                engine.check(list(dict.fromkeys(prompt)), prefetch=True)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(30)


def picture(tab: Browser, name: str) -> None:
    if PICTURES:
        tab.picture(Path(PICTURES) / f"{name}.png")


def address(daemon: Daemon) -> str:
    return f"http://{daemon.ready()['http']}/"


def test_the_page_under_load_and_across_a_restart(tab: Browser, daemon: Daemon) -> None:
    with contextlib.ExitStack() as engines:
        for model, page_bytes in MODELS.items():
            engines.enter_context(load(daemon, model, page_bytes))
        tab.look(1280, 900)
        tab.open(address(daemon))
        until(lambda: tab.text("#state") == "serving", "the page shows the daemon")
        until(lambda: "hits" in tab.text("#verdict"), "the verdict tells of hits")
        until(lambda: tab.text("#f-load").endswith("B/s"), "bandwidth of loads")
        until(lambda: "Llama-3.1-70B" in tab.text("#models"), "the models")
        until(lambda: "eviction" in tab.text("#events"), "what happened", 60)
        assert "llama-3.1-70b" in tab.text("#engines")
        assert "of 48.0 MiB" in tab.text("#spaces")
        assert tab.run("document.querySelectorAll('#speed path').length") >= 2
        time.sleep(BUSY_S)
        picture(tab, "page-light")
        tab.look(1280, 900, "dark")
        tab.run("dispatchEvent(new Event('resize'))")
        picture(tab, "page-dark")
        tab.look(390, 844)
        tab.run("dispatchEvent(new Event('resize'))")
        assert tab.run("document.documentElement.scrollWidth") <= 390, "no sideways scrolling"
        picture(tab, "page-phone")
        before = ask(daemon, "/v1/stats").json["boot_id"]
        daemon.kill()
        until(lambda: tab.text("#state") == "away", "the page says that the daemon is away")
        daemon.start()
        after = ask(daemon, "/v1/stats").json["boot_id"]
        until(lambda: tab.text("#state") == "serving", "the page finds the daemon again")
        until(lambda: after[:12] in tab.text("#about"), "it shows the new boot")
        assert before[:12] not in tab.text("#about")
        until(lambda: "hits" in tab.text("#verdict"), "the engines came back")
    refused = [text for text in tab.said if "ERR_CONNECTION_REFUSED" not in text]
    assert [text for text in refused if "net::" not in text] == [], "no error, no policy violated"


def test_findings_and_lines_that_connect(tab: Browser, daemon: Daemon) -> None:
    tab.open(address(daemon))
    until(lambda: "vllm serve" in tab.text("#connect"), "lines that connect")
    line = tab.run("document.querySelector('#connect pre').textContent")
    config = json.loads(line.partition("--kv-transfer-config '")[2].rstrip("'"))
    assert config["kv_connector_extra_config"]["url"] == f"kvhearth+unix://{daemon.socket_dir}"
    shown = tab.text("#doctor")
    for finding in ask(daemon, "/v1/guide").json["findings"]:
        assert finding["found"] in shown
        assert finding["fix"] in shown


def test_it_is_used_by_keyboard(tab: Browser, daemon: Daemon) -> None:
    tab.open(address(daemon))
    until(lambda: "vllm serve" in tab.text("#connect"), "lines that connect")
    tab.press("Tab")
    assert tab.run("document.activeElement.className") == "skip"
    tab.press("Enter")
    assert tab.run("document.activeElement.id") == "main"
    seen = set()
    for _ in range(40):
        tab.press("Tab")
        seen.add(tab.run("document.activeElement.textContent"))
        if "Copy" in seen:
            break
    assert "Copy" in seen
    tab.press("Enter")
    until(lambda: tab.run("document.activeElement.textContent") in ("Copied", "Selected"))


def test_curves_are_drawn_if_there_are_any(tab: Browser, daemon: Daemon) -> None:
    tab.open(address(daemon))
    until(lambda: tab.text("#state") == "serving", "the page shows the daemon")
    until(lambda: not tab.run("$('mrc').hidden"), "the daemon tells its own curves")
    points = [{"factor": factor, "hit_ratio": factor / 5} for factor in (0.5, 1, 2, 4)]
    curves = json.dumps([{"namespace": "all", "memory": points, "ssd": []}])
    paths = "document.querySelectorAll('#curve path').length"
    assert tab.run(f"stats.curves = {curves}, curves(), {paths}") == 1
    assert tab.run("$('mrc').hidden = false, $('curve').textContent.includes('4')")
    assert tab.run("delete stats.curves, curves(), $('mrc').hidden")


def test_first_paint(tab: Browser, daemon: Daemon) -> None:
    tab.open(address(daemon))
    until(lambda: tab.text("#state") == "serving", "the page shows the daemon")
    paints = "performance.getEntriesByType('paint').map(each => each.startTime)"
    painted_ms = max(until(lambda: tab.run(paints), "the first paint"))
    assert painted_ms < 10_000, "a second is the target; a busy machine has more"


def test_the_description_of_the_api(tab: Browser, daemon: Daemon) -> None:
    tab.open(address(daemon) + "docs")
    until(lambda: "GET /v1/stats" in tab.text("#list"), "the calls")
    assert tab.run("document.querySelectorAll('details').length") > 10


def test_pages_are_small_and_run_nothing_else(daemon: Daemon) -> None:
    for path in ("/", "/docs"):
        answer = ask(daemon, path)
        assert answer.status == 200
        assert answer.headers["content-type"] == "text/html; charset=utf-8"
        assert len(answer.body) <= PAGE_BYTES_MAX
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'sha256-")
        assert "unsafe" not in policy
        assert b"http://" not in answer.body.replace(b"http://www.w3.org/2000/svg", b"")
        assert b"https://" not in answer.body


def test_viewers_are_bounded(daemon: Daemon) -> None:
    import http.client

    host, _, port = str(daemon.ready()["http"]).rpartition(":")
    viewers = [http.client.HTTPConnection(host, int(port), timeout=20) for _ in range(VIEWERS_MAX)]
    try:
        for each in viewers:
            each.request("GET", "/v1/events")
            first = each.getresponse()
            assert first.status == 200
            assert first.readline() == b"event: history\n"
        assert ask(daemon, "/v1/events").status == 503
        assert ask(daemon, "/livez").status == 200
    finally:
        for each in viewers:
            each.close()
    until(lambda: daemon.terminate() == 0 or True, "viewers hold up no stop")


def test_a_path_that_is_not_there_counts_as_nothing(daemon: Daemon) -> None:
    before = daemon.counters()
    answer = ask(daemon, "/favicon.ico")
    assert (answer.status, answer.json["reason"]) == (404, "no_such_path")
    after = daemon.counters()
    assert {n: c for n, c in after.items() if n.startswith("refusals")} == {
        n: c for n, c in before.items() if n.startswith("refusals")
    }
