"""The page in a real browser, against a live daemon under load and across its restart."""

from __future__ import annotations

import contextlib
import json
import random
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.browser import Browser, browser
from support.daemon import Daemon, free_port, running_daemon, until
from support.http_door import ask
from support.raw_door import new_keys

from kvhearth_lab.harness import HUNG_S
from kvhearth_lab.harness.engine import contract_of, engine_of

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
        thread.join(HUNG_S)


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
        until(lambda: "eviction" in tab.text("#events"), "what happened")
        assert "llama-3.1-70b" in tab.text("#engines")
        assert "of 48.0 MiB" in tab.text("#spaces")
        assert tab.run("document.querySelectorAll('#speed path').length") >= 2
        tab.look(1280, 900, "dark")
        tab.run("dispatchEvent(new Event('resize'))")
        tab.look(390, 844)
        tab.run("dispatchEvent(new Event('resize'))")
        assert tab.run("document.documentElement.scrollWidth") <= 390, "no sideways scrolling"
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
    url = f"kvhearth+unix://{daemon.socket_dir}"
    assert config["kv_connector_extra_config"]["url"] == url
    lines = tab.text("#connect")
    for name in ("KVHearthTier", "KVHearthHiCache", "KVHearthL2Adapter"):
        [found] = [json.loads(text) for text in re.findall(r"'(\{.*\})'", lines) if name in text]
        assert url in json.dumps(found)
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


def test_the_description_of_the_api(tab: Browser, daemon: Daemon) -> None:
    tab.open(address(daemon) + "docs")
    until(lambda: "GET /v1/stats" in tab.text("#list"), "the calls")
    assert tab.run("document.querySelectorAll('details').length") > 10
