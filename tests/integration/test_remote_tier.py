"""Daemons that share a remote tier: what one stores, another one or its successor loads."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

from support.bad_bucket import bad_bucket
from support.cached import PAGE_BYTES, CachedEngine, cached_engine, computed
from support.daemon import Daemon, stopped_daemon, until
from support.http_door import ANY_PORT, ask, scraped
from support.raw_door import new_keys
from support.ssd_kit import SSD

from kvhearth_server.cli.app import run

ALL = {"remote_write": "all"}


def published(daemon: Daemon, blocks: int) -> None:
    """Wait until a daemon has published so many blocks."""
    until(lambda: daemon.counters()["published_blocks"] >= blocks, "blocks are published")


def loaded(engine: CachedEngine, keys: list[bytes]) -> int:
    """Load keys, which may wait for the remote; return the blocks that came."""
    return int(engine.load(keys, wait_s=5.0).loaded.sum())


@contextlib.contextmanager
def pair(
    folder: Path, first: Mapping[str, object] = MappingProxyType({}), **settings: object
) -> Iterator[tuple[Daemon, Daemon]]:
    """Two running daemons that share a directory as their remote; ``first`` is for one of them."""
    folder.mkdir(exist_ok=True)
    shared = {"remote": f"file://{folder}", "remote_staging": "8MiB", **ALL, **settings}
    with (
        stopped_daemon(arena=False, **shared, **first) as one,
        stopped_daemon(arena=False, **shared) as other,
    ):
        for daemon in (one, other):
            daemon.start()
        yield one, other
        for daemon in (one, other):
            daemon.wait_quiet()


def comes(daemon: Daemon, keys: list[bytes]) -> None:
    """Wait until a daemon's engine loads all keys, each byte compared."""
    with cached_engine(daemon.url()) as engine:
        until(lambda: loaded(engine, keys) == len(keys), "all blocks come")


def test_one_daemon_loads_what_another_one_published(tmp_path: Path) -> None:
    """One has an SSD tier between."""
    keys = new_keys(40)
    first = {**SSD, "ssd_dirs": [f"{tmp_path}/ssd=32MiB"]}
    with pair(tmp_path / "shared", first) as (one, other):
        with cached_engine(one.url()) as engine:
            engine.store(keys)
            published(one, len(keys))
        comes(other, keys)
        with cached_engine(other.url()) as engine:
            assert loaded(engine, new_keys(3)) == 0
        assert other.counters()["remote_keys"] >= len(keys)
        one.kill()
        one.start()
        comes(one, keys)


def exchange(first: Path, second: Path) -> None:
    """Give two records each other's names."""
    one, two = first.read_bytes(), second.read_bytes()
    first.write_bytes(two)
    second.write_bytes(one)


def test_what_others_write_to_a_bucket_is_not_believed_and_told(tmp_path: Path) -> None:
    keys, folder = new_keys(6), tmp_path / "shared"
    with pair(folder, http=ANY_PORT) as (one, other):
        with cached_engine(one.url()) as engine:
            engine.store(keys)
            published(one, len(keys))
        records = [each for each in folder.rglob("*") if each.stat().st_size > PAGE_BYTES]
        whole = [each.read_bytes() for each in records]
        assert len(records) == len(keys)
        assert not any(computed([key])[0].tobytes() in data for key in keys for data in whole)
        exchange(records[0], records[1])
        records[2].write_bytes(b"none of ours".ljust(len(whole[2])))
        for record, data in zip(records[3:], whole[3:], strict=True):
            record.write_bytes(data[:-PAGE_BYTES] + bytes(PAGE_BYTES))
        with cached_engine(other.url()) as engine:
            until(
                lambda: (
                    not loaded(engine, keys)
                    and b"not as this fleet wrote them" in ask(other, "/readyz?verbose").body
                ),
                "no block comes, and that is told",
            )
        found = scraped(other)
        name = f'kvhearth_remote_blocks_total{{remote="file://{folder}",outcome='
        assert f'{name}"altered"}} 0' not in found
        assert f'{name}"loaded"}} 0' in found


def test_blocks_are_published_when_they_are_used_again(tmp_path: Path) -> None:
    keys = new_keys(20)
    with pair(tmp_path / "shared", remote_write="reuse") as (one, other):
        with cached_engine(one.url()) as engine:
            engine.store(keys)
            assert loaded(engine, keys) == len(keys)
            assert one.counters()["published_blocks"] == 0
            assert loaded(engine, keys) == len(keys)
            published(one, len(keys))
        comes(other, keys)


def puts(*daemons: Daemon) -> int:
    """Return the number of blocks that daemons sent to their remote."""
    found = re.findall(
        r'kvhearth_remote_requests_total{.*kind="put"} (\d+)', "".join(map(scraped, daemons))
    )
    assert len(found) == len(daemons)
    return sum(map(int, found))


def test_a_block_is_sent_once_by_a_fleet(tmp_path: Path) -> None:
    """Whether the second daemon computes it or loads it."""
    keys, more = new_keys(20), new_keys(20)
    with pair(tmp_path / "shared", http=ANY_PORT) as (one, other):
        with cached_engine(other.url()) as engine:
            assert loaded(engine, keys) == 0, "for a while it counts as absent there"
            with cached_engine(one.url()) as first:
                first.store(keys + more)
                published(one, 40)
            engine.store(keys)
            published(other, 20)
            assert loaded(engine, more) == 20
            published(other, 40)
        assert puts(one, other) == 40
        other.kill()  # it forgets what is there
        other.start()
        comes(other, keys)
        with cached_engine(other.url()) as engine:
            engine.store(more)
            published(other, 40)
        assert puts(one, other) == 40


def test_a_daemon_goes_on_with_keys_that_are_renewed(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("id\nsecret\none\n")
    with bad_bucket() as bucket:
        bucket.token = "one"
        settings = {"remote": f"{bucket.url}&secret_file={keys}", "remote_staging": "8MiB", **ALL}
        with stopped_daemon(arena=False, **settings) as daemon:
            daemon.start()
            with cached_engine(daemon.url()) as engine:
                engine.store(new_keys(4))
                published(daemon, 4)
                bucket.token = "two"
                until(
                    lambda: engine.store(new_keys(1)) and "requests fail" in daemon.log_text(),
                    "the breaker opens",
                )
                keys.write_text("id\nsecret\ntwo\n")
                until(lambda: "two" in bucket.tokens, "they are read")
                before = daemon.counters()["published_blocks"]
                until(
                    lambda: (
                        engine.store(new_keys(1)) and daemon.counters()["published_blocks"] > before
                    ),
                    "blocks are published",
                )
            bucket.token = ""
            keys.write_text("id\nsecret\nthree\n")
            daemon.operator().reload_settings()
            until(lambda: "three" in bucket.tokens, "a reload reads them, too")


def test_a_fleet_finds_blocks_by_its_key_and_the_label_of_the_weights(tmp_path: Path) -> None:
    keys, (key, other_key) = new_keys(8), (tmp_path / "key", tmp_path / "other")
    for path, text in ((key, "a" * 64), (other_key, "b" * 64)):
        path.write_text(text)
        path.chmod(0o600)
    with (
        pair(tmp_path / "shared", remote_fleet_key_file=str(key)) as (one, other),
        cached_engine(one.url()) as engine,
        cached_engine(other.url()) as foreign,
    ):
        assert engine.client.bump_epoch(label="step 1") > 0
        engine.store(keys)
        published(one, len(keys))
        assert loaded(foreign, keys) == 0, "it has the first weights"
        assert foreign.client.bump_epoch(label="step 1") > 0
        until(lambda: loaded(foreign, keys) == len(keys), "it has the same weights")
        assert foreign.client.bump_epoch() > 0
        assert loaded(foreign, keys) == 0, "weights without a label"
    # A directory of another fleet is refused, or at least none of its blocks is found.
    with (
        pair(tmp_path / "shared", remote_fleet_key_file=str(other_key)) as (one, _),
        cached_engine(one.url()) as engine,
    ):
        assert engine.client.bump_epoch(label="step 1") > 0
        assert loaded(engine, keys) == 0


def test_operators_name_new_weights(tmp_path: Path) -> None:
    keys = new_keys(8)

    def forget(daemon: Daemon, *more: str) -> None:
        (space,) = daemon.operator().namespaces().namespaces
        words = ["forget", space.namespace, "--yes", "--socket-dir", str(daemon.socket_dir), *more]
        assert run(words) == 0

    with pair(tmp_path / "shared") as (one, other):
        for daemon in (one, other):
            with cached_engine(daemon.url()) as engine:
                engine.store(new_keys(1))
                published(daemon, 1)
            forget(daemon, "--label", "step 1")
        with cached_engine(one.url()) as engine:
            engine.store(keys)
            published(one, 1 + len(keys))
        comes(other, keys)
        forget(other)
        with cached_engine(other.url()) as engine:
            assert loaded(engine, keys) == 0, "weights without a label"


def test_an_engine_keeps_its_label_over_a_cold_start_of_its_daemon(tmp_path: Path) -> None:
    keys, first = new_keys(8), new_keys(8)
    with pair(tmp_path / "shared") as (one, other):
        with cached_engine(other.url()) as engine:
            engine.store(first)
            published(other, len(first))
        with cached_engine(one.url()) as engine:
            assert engine.client.bump_epoch(label="step 7") > 0
            engine.store(keys)
            published(one, len(keys))
            boot_id = engine.client.boot_id
            one.kill()
            one.start()
            until(lambda: engine.client.boot_id not in ("", boot_id), "it attaches again")
            until(lambda: loaded(engine, keys) == len(keys), "blocks of its weights come")
            assert loaded(engine, first) == 0, "blocks of the first weights do not"


def test_bounds_and_policy_change_while_it_serves(tmp_path: Path) -> None:
    (remote := tmp_path / "remote").mkdir()
    first, second, config = new_keys(4), new_keys(4), tmp_path / "settings.yaml"
    config.write_text("remote_write: all\n")
    shared = {"remote": f"file://{remote}", "config": config}
    with stopped_daemon(arena=False, **shared) as daemon:
        daemon.start()
        operator = daemon.operator()
        with cached_engine(daemon.url()) as engine:
            engine.store(first)
            published(daemon, len(first))
            config.write_text(
                "remote_write: never\nremote_bytes_per_s: 1MiB\nremote_staging: 9MiB\n"
            )
            done = operator.reload_settings()
            assert sorted(done.changed) == ["remote_bytes_per_s", "remote_write"]
            assert list(done.needs_restart) == ["remote_staging"]
            engine.store(second)
            config.write_text("remote_write: all\nremote_bytes_per_s: 1\n")
            assert sorted(operator.reload_settings().changed) == [
                "remote_bytes_per_s",
                "remote_write",
            ]
            engine.store(new_keys(4))
            published(daemon, len(first) + 1)
            engine.store(new_keys(4))
        assert daemon.counters()["published_blocks"] <= len(first) + 4, "a byte a second"


def test_a_remote_that_is_not_there_costs_nothing_and_is_told(tmp_path: Path) -> None:
    keys = new_keys(8)
    missing = f"file://{tmp_path}/missing/deep"
    with stopped_daemon(arena=False, remote=missing, http=ANY_PORT, **ALL) as daemon:
        daemon.start()
        with cached_engine(daemon.url()) as engine:
            engine.store(keys)
            assert loaded(engine, keys) == len(keys)
            found = engine.client.lookup({0: new_keys(512)}, lease=False)
            assert not found.reason
            assert not found.eta_us
        until(lambda: "remote.degraded" in daemon.log_text(), "the log tells")
        ready = ask(daemon, "/readyz?verbose")
        assert ready.status == 200
        assert f"[!]remote {missing}".encode() in ready.body
        assert f'kvhearth_remote_up{{remote="{missing}"}} 0' in scraped(daemon)
