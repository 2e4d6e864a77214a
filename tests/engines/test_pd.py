"""Prefill/decode disaggregation: one engine prefills, another decodes, through the daemon."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from engines.harness import Engine, arguments, connector, running_engine
from engines.kit import (
    TOKENS,
    Answer,
    Reference,
    all_same,
    prompt,
    same,
    servable,
    wait_attached,
    wait_settled,
    wait_stored,
    whole_blocks,
)
from support.daemon import Daemon, free_port
from support.networks import NETWORK_ENV, Hosts, two_hosts

LENGTH = 1000
SERVED = whole_blocks(LENGTH)


@pytest.fixture(scope="module", params=["unix", "remote"])
def hosts(request: pytest.FixtureRequest) -> Iterator[Hosts | None]:
    """The engines' hosts: that of the daemon, or two networks of their own."""
    if request.param == "unix":
        yield None
    else:
        with two_hosts() as found:
            yield found


@pytest.fixture(scope="module")
def reach(hosts: Hosts | None) -> dict[str, object]:
    """The daemon's settings for the way that its engines reach it."""
    return {} if hosts is None else {"listen": f"0.0.0.0:{free_port()}", "insecure": True}


@contextlib.contextmanager
def engine_of(
    logs: Path, daemon: Daemon, hosts: Hosts | None, number: int, role: str
) -> Iterator[Engine]:
    """Yield the engine of a role, on the host of that number."""
    place = {} if hosts is None else {"host": hosts.gateways[number]}
    environment = {} if hosts is None else {NETWORK_ENV: hosts.names[number]}
    options = arguments(kv_transfer_config=connector(daemon, role, **place))
    with running_engine(logs, environment, **options) as found:
        yield found


@pytest.fixture(scope="module")
def prefill(logs: Path, daemon: Daemon, hosts: Hosts | None) -> Iterator[Engine]:
    """The engine that prefills."""
    with engine_of(logs, daemon, hosts, 0, "kv_producer") as found:
        yield found


@pytest.fixture(scope="module")
def decode(logs: Path, daemon: Daemon, hosts: Hosts | None) -> Iterator[Engine]:
    """The engine that decodes."""
    with engine_of(logs, daemon, hosts, 1, "kv_consumer") as found:
        wait_attached(daemon, 2)
        yield found


def handed_over(prefill: Engine, decode: Engine, text: list[int]) -> Answer:
    """Acts as a proxy: takes one token from one engine, then sends the same prompt to the other at
    once, with the first one's transfer parameters.
    """
    first = prefill.one(text, tokens=1)
    assert first["cached"] == 0
    return decode.one(text, tokens=TOKENS, transfer=first.get("transfer"))


def test_handed_over(prefill: Engine, decode: Engine, daemon: Daemon, reference: Reference) -> None:
    text = prompt("disaggregated")
    before = servable(daemon)
    first = prefill.one(text, tokens=1)
    assert first["tokens"] == reference.answer(text)["tokens"][:1]
    wait_stored(daemon, before + LENGTH // 128)
    found = decode.one(text, tokens=TOKENS, transfer=first.get("transfer"))
    same(found, reference.answer(text), "decoded elsewhere")
    assert found["cached"] == SERVED


def test_handed_over_at_once(
    prefill: Engine, decode: Engine, daemon: Daemon, reference: Reference
) -> None:
    """The answer is right whether or not the blocks arrived before the request."""
    texts = [prompt(f"at once {number}") for number in range(6)]
    expected = reference.answers(texts)
    all_same([handed_over(prefill, decode, each) for each in texts], expected, "at once")


def test_roles_keep_to_themselves(
    prefill: Engine, decode: Engine, daemon: Daemon, reference: Reference
) -> None:
    """The prefilling engine loads nothing, the decoding engine stores nothing."""
    text = prompt("roles")
    wait_settled(daemon)
    stored = servable(daemon)
    same(decode.one(text, tokens=TOKENS), reference.answer(text), "only decoded")
    decode.reset()
    wait_settled(daemon)
    assert servable(daemon) == stored
    same(prefill.one(text, tokens=TOKENS), reference.answer(text), "prefilled")
    wait_stored(daemon, stored + LENGTH // 128)
    prefill.reset()
    assert prefill.one(text, tokens=1)["cached"] == 0


def test_prefilling_engine_killed(
    prefill: Engine, decode: Engine, daemon: Daemon, reference: Reference
) -> None:
    """Its stored blocks stay, and the decoding engine continues."""
    text = prompt("left behind")
    before = servable(daemon)
    prefill.one(text, tokens=1)
    wait_stored(daemon, before + LENGTH // 128)
    running = prefill.begin("generate", requests=[{"prompt": prompt("cut off", 3000), "tokens": 1}])
    prefill.kill()
    assert running.exception(20.0) is not None
    found = decode.one(text, tokens=TOKENS)
    same(found, reference.answer(text), "after the other's death")
    assert found["cached"] == SERVED
    wait_settled(daemon)
    decode.reset()
