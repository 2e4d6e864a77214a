"""Settings: sources and their precedence, human-readable values, and messages with the fix."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.cases import cases

from kvhearth.errors import KVHearthError, Reason
from kvhearth_server.cli.config import settings_yaml
from kvhearth_server.config.load import (
    Settings,
    flag_of,
    load_settings,
    merged_settings,
    unread_environment,
)
from kvhearth_server.config.model import RELOADABLE, SOCKET_PATH_BYTES_MAX
from kvhearth_server.config.value_types import (
    SsdDir,
    TenantSetting,
    format_duration_s,
    format_size,
    parse_duration_s,
    parse_size,
    parse_tenant,
)
from kvhearth_server.tiers.ssd.settings import SEGMENTS_LEAST, segment_bytes_for, segments_max

HERE = {"socket_dir": "/run/kvhearth"}
"""A given socket directory: no directory is chosen by what this machine and user have."""

ROUTABLE = ("0.0.0.0:9460", "[::]:1", "192.168.0.1:1", "example.org:1")

pytestmark = pytest.mark.usefixtures("no_environment")


def refusal(config: Path | None = None, **flags: object) -> str:
    with pytest.raises(KVHearthError) as caught:
        load_settings(flags, config)
    assert caught.value.reason is Reason.CONFIG_INVALID
    assert "\n" not in caught.value.message
    return caught.value.message


SIZES = {
    "4096": 4096,
    "512MiB": 512 << 20,
    "64GiB": 64 << 30,
    "1.5 gib": 3 << 29,
    "2Ti": 2 << 40,
    "16Ki": 16 << 10,
    "7B": 7,
    "64G": 64 * 10**9,
    "64GB": 64 * 10**9,
    "64gb": 64 * 10**9,
    "64Gi": 64 << 30,
    "1.1T": 11 * 10**11,
    "5kB": 5000,
    "9007199254.740993M": 9007199254740993,
    "9007199254740993": 9007199254740993,
}
NO_SIZES = ("", "12 bananas", "64GG", "-1", "0.3", "1.00001KiB", "1.0001K", True, None)
DURATIONS = {"30s": 30.0, "500ms": 0.5, "5m": 300.0, "24h": 86400.0, "1d": 86400.0, "5": 5.0}
NO_DURATIONS = ("", "soon", "5 weeks", "-1s", True, None)


def test_sizes() -> None:
    assert {text: parse_size(text) for text in SIZES} == SIZES
    assert parse_size(4096) == 4096
    for size in (*SIZES.values(), 0, 5, 999):
        assert parse_size(format_size(size)) == size


def test_durations() -> None:
    assert {text: parse_duration_s(text) for text in DURATIONS} == DURATIONS
    for seconds in (*DURATIONS.values(), 5, 0.5):
        assert parse_duration_s(seconds) == seconds
        assert parse_duration_s(format_duration_s(seconds)) == pytest.approx(seconds)


@cases(
    ("parse", "text", "reported"),
    [(parse_size, text, "not a size") for text in NO_SIZES]
    + [(parse_duration_s, text, "not a duration") for text in NO_DURATIONS],
)
def test_what_is_no_quantity(parse: Any, text: object, reported: str) -> None:
    with pytest.raises(ValueError, match=reported):
        parse(text)


def test_defaults_are_valid_and_frozen() -> None:
    settings = Settings()
    assert settings.memory_bytes == 1 << 30
    assert settings.attach_socket == Path("/run/kvhearth/attach.sock")
    assert settings.grpc_socket == Path("/run/kvhearth/grpc.sock")
    with pytest.raises(ValueError, match="frozen"):
        settings.memory = 1


def test_what_may_change_is_merged_and_the_rest_is_told() -> None:
    running = Settings(sessions_max=10, keys_max=7)
    read = Settings(sessions_max=20, keys_max=8, log_level="debug")
    new, changed, restart = merged_settings(running, read)
    assert new == Settings(sessions_max=20, keys_max=7, log_level="debug")
    assert (changed, restart) == (["sessions_max", "log_level"], ["keys_max"])
    assert merged_settings(new, new) == (new, [], [])
    assert Settings.model_fields.keys() >= RELOADABLE


def test_addresses() -> None:
    addresses = {
        "OFF": None,
        "127.0.0.1:9460": ("127.0.0.1", 9460),
        "127.8.0.1:0": ("127.8.0.1", 0),
        "[::1]:65535": ("::1", 65535),
        "localhost:80": ("localhost", 80),
    }
    assert {text: Settings(http=text).http_address for text in addresses} == addresses
    for text in ROUTABLE:
        assert Settings(http=text, http_insecure=True).http == text


def test_every_setting_is_described() -> None:
    undescribed = [n for n, field in Settings.model_fields.items() if not field.description]
    assert undescribed == []


def test_the_order_of_the_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "kvhearth.yaml"
    path.write_text("memory: 256MiB\nsessions_max: 7\npins_max: 8\npin_ttl_max_s: 1h\n")
    monkeypatch.setenv("KVHEARTH_SESSIONS_MAX", "9")
    monkeypatch.setenv("KVHEARTH_PINS_MAX", "10")
    settings = load_settings({"pins_max": "11"}, path)
    assert (settings.memory, settings.sessions_max, settings.pins_max) == (256 << 20, 9, 11)
    assert settings.pin_ttl_max_s == 3600
    assert settings.keys_max == 8192


def test_the_file_may_be_named_in_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "kvhearth.yaml"
    path.write_text("keys_max: 5\ntenants: ['a=1,2:128MiB']\nshared_index: false\n")
    monkeypatch.setenv("KVHEARTH_CONFIG", str(path))
    settings = load_settings({})
    assert (settings.keys_max, Settings().keys_max) == (5, 8192)
    assert settings.tenants == (TenantSetting("a", (1, 2), 128 << 20),)
    assert not settings.shared_index


def test_other_variables_are_left_alone_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVHEARTH_FAULT", "commit.after_journal:3")
    monkeypatch.setenv("KVHEARTH_MEMROY", "64GiB")
    monkeypatch.setenv("KVHEARTH_ARENA_DIR", "")
    assert load_settings(HERE).arena_dir is None
    assert unread_environment() == ["KVHEARTH_MEMROY"]


def test_lists_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVHEARTH_TENANTS", "a=1,2:128MiB b=3:64MiB")
    assert [tenant.name for tenant in load_settings({}).tenants] == ["a", "b"]
    monkeypatch.delenv("KVHEARTH_TENANTS")
    monkeypatch.setenv("KVHEARTH_ALLOW_UIDS", "1000,1001")
    assert load_settings({}).allow_uids == (1000, 1001)


def test_each_bad_value_is_told_with_where_it_is_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "kvhearth.yaml"
    path.write_text("memory: 12 bananas\nmemroy: 1\n_env_file: x\n")
    monkeypatch.setenv("KVHEARTH_KEYS_MAX", "abc")
    reported = refusal(path, hugepages="maybe", pin_ttl_max_s="soon")
    assert f"memory (in {path}): '12 bananas': not a size; write bytes" in reported
    assert f"memroy (in {path}): there is no such setting; did you mean memory?" in reported
    assert f"_env_file (in {path}): there is no such setting; " in reported
    assert "KVHEARTH_KEYS_MAX: 'abc'" in reported
    assert "--hugepages: 'maybe'" in reported
    assert "'prefer'" in reported
    assert "--pin-ttl-max-s: 'soon': not a duration" in reported


@cases(
    "text",
    [
        "- a\n- b\n",
        "just words",
        "a: [",
        "\x00",
        "a: " + "[" * 5000,
        "memory: 2001-99-99",
        'memory: !!timestamp "x"',
        'memory: !!bool "x"',
        'memory: !!int ""',
        "memory: " + "9" * 5000,
        "memory: &a [*a]",
        "a: &a [1, 1]\n" + "".join(f"a{n}: &a [*a, *a]\n" for n in range(40)),
        "#" * (1 << 20) + "\n",
    ],
)
def test_a_file_that_holds_no_settings(tmp_path: Path, text: str) -> None:
    path = tmp_path / "kvhearth.yaml"
    path.write_text(text)
    assert str(path) in refusal(path)


def test_a_file_that_is_not_there_or_empty(tmp_path: Path) -> None:
    assert "cannot read --config" in refusal(tmp_path / "none.yaml")
    (tmp_path / "empty.yaml").touch()
    assert load_settings(HERE, tmp_path / "empty.yaml") == Settings()


DRIVE = {"ssd_dirs": ["/a=8GiB"], "ssd_segment_bytes": "64MiB"}
REFUSED: list[tuple[dict[str, object], str]] = [
    ({"memory": "32MiB"}, "memory: 32MiB is less than one slab"),
    ({"memory": "0"}, "--memory: '0'"),
    ({"keys_max": "many"}, "--keys-max: 'many'"),
    ({"keys_max": 0}, "--keys-max: 0"),
    ({"slab_bytes": "3MiB"}, "slab_bytes: 3MiB is not a multiple of 2MiB"),
    ({"slab_bytes": "0"}, "slab_bytes: 0 is not a multiple of 2MiB"),
    ({"slab_bytes": "2MiB", "slot_bytes_min": "4MiB"}, "not a multiple of slot_bytes_min"),
    ({"slot_bytes_min": "12KiB"}, "slot_bytes_min: 12288 is not a power of two"),
    ({"slot_bytes_min": "2KiB"}, "slot_bytes_min: 2048 is not a power of two of at least 4096"),
    ({"held_fraction_max": "0.2"}, "stock_fraction_max: 0.25 is more than held_fraction_max"),
    ({"held_fraction_max": "1.0"}, "--held-fraction-max: '1.0'"),
    ({"tenants": "a=1:2GiB"}, "tenants: 2GiB together is more than memory (1GiB)"),
    ({"tenants": "a=1:1MiB"}, "tenants: a has 1MiB, less than one slab"),
    ({"tenants": "a=1:0"}, "tenants: a has"),
    ({"tenants": "a=1:64MiB a=2:64MiB"}, "a name is there twice"),
    ({"tenants": "a=1:64MiB b=1:64MiB"}, "a user id is there twice"),
    ({"tenants": "a=1:64MiB", "allow_uids": "5"}, "allow_uids: is for the default tenant"),
    ({"tenants": "a:64MiB"}, "write NAME=UID[,UID...]:SIZE"),
    ({"tenants": "A=1:64MiB"}, "tenant name 'A'"),
    ({"allow_uids": "root"}, "'root' is not a user id"),
    ({"allow_uids": str(2**32 - 1)}, "is not a user id"),
    ({"drain_grace_s": "inf"}, "--drain-grace-s: 'inf': not a duration"),
    ({"attach_timeout_s": 0}, "--attach-timeout-s: 0"),
    ({"switch_interval_s": "1s"}, "--switch-interval-s: '1s'"),
    ({"message_bytes_max": "much"}, "--message-bytes-max: 'much': not a size"),
    ({"message_bytes_max": 100}, "--message-bytes-max: 100"),
    ({"socket_dir": "/a\0b"}, "a path has no zero byte"),
    ({"arena_dir": "/a\ud800"}, "not UTF-8"),
    ({"ssd_dirs": ["~no-such-user/x=1GiB"]}, "not a directory here"),
    *(
        ({"http": f"{host}:80", "http_insecure": True}, "is not HOST:PORT")
        for host in ("x" * 70, "a..b", "a b", "a\0b", "]", "[[::1]]", "::1")
    ),
    *(({"http": address}, "other machines may reach") for address in ROUTABLE),
    # the SSD tier
    ({"ssd_dirs": ["/mnt/kv"]}, "--ssd-dir: ['/mnt/kv']: '/mnt/kv' is not a directory and its"),
    ({"ssd_dirs": ["=1GiB"]}, "is not a directory and its size; write /mnt/nvme/kv=500GiB"),
    ({"ssd_dirs": ["kv=1GiB"]}, "'kv' is not absolute; write it from / on"),
    ({"ssd_dirs": ["/mnt/kv=1GG"]}, "not a size; write bytes or a unit: 65536, 512MiB"),
    ({"ssd_dirs": ["/a=1GiB", "/b/../a=2GiB"]}, "ssd_dirs: /a is there twice"),
    ({"ssd_dirs": ["/a=200MiB"]}, "/a has 200MiB, too little for the log's files; give it 268M"),
    ({"ssd_dirs": ["/a=2049TiB"]}, "/a has 2049TiB, more than any drive"),
    ({**DRIVE, "ssd_segment_bytes": "8GiB"}, "give it 32907MiB or more"),
    ({**DRIVE, "ssd_segment_bytes": "5000"}, "5000 is not a multiple of 4096"),
    ({**DRIVE, "ssd_segment_bytes": "32KiB"}, "of at least 64KiB"),
    ({"ssd_interface": "aio"}, "--ssd-interface: 'aio'"),
    ({"ssd_depth": "0"}, "--ssd-depth: '0'"),
    ({"ssd_admission": "some"}, "--ssd-admission: 'some'"),
    ({"ssd_bytes_per_day": "-1"}, "--ssd-bytes-per-day: '-1'"),
    (
        {**DRIVE, "tenants": "a=1:64MiB:6GiB b=2:64MiB:3GiB"},
        "together they get 9GiB of the SSD tier's 8GiB",
    ),
    ({**DRIVE, "tenants": "a=1:64MiB:7936MiB b=2:64MiB"}, "b has room for 3 files of 64MiB in"),
    ({**DRIVE, "tenants": "a=1:64MiB:1GiB:2GiB"}, "is not a tenant"),
]


@cases(("flags", "reported"), REFUSED)
def test_what_cannot_be_or_does_not_fit_together(flags: dict[str, object], reported: str) -> None:
    assert reported in refusal(**flags)


# -- the SSD tier ----------------------------------------------------------------------------------


def test_ssd_directories_from_flags_environment_and_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "kvhearth.yaml"
    path.write_text('ssd_dirs: ["/mnt/a b=1GiB", /mnt/b=c=2TiB]\n')
    wanted = (SsdDir(Path("/mnt/a b"), 1 << 30), SsdDir(Path("/mnt/b=c"), 2 << 40))
    assert load_settings({}, path).ssd_dirs == wanted
    assert load_settings({"ssd_dirs": ["/mnt/a b=1GiB", "/mnt/b=c=2TiB"]}).ssd_dirs == wanted
    monkeypatch.setenv("KVHEARTH_SSD_DIRS", " /mnt/x=1GiB  /mnt/y/../z=1GiB ")
    found = load_settings({}, path).ssd_dirs
    assert found == (SsdDir(Path("/mnt/x"), 1 << 30), SsdDir(Path("/mnt/z"), 1 << 30))
    assert flag_of("ssd_dirs") == "--ssd-dir"


@cases("size", ["268MiB", "1GiB", "3TiB", "1024TiB"])
def test_what_is_said_to_be_enough_is_what_the_tier_takes(size: str) -> None:
    settings = load_settings({"ssd_dirs": [f"/mnt/kv={size}"]})
    room = settings.ssd_room(settings.ssd_dirs[0])
    assert segments_max(room, segment_bytes_for(room)) >= SEGMENTS_LEAST


# -- directories -----------------------------------------------------------------------------------


def test_what_is_told_is_short_and_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "kvhearth.yaml"
    names = "".join(f'"n{number}\\n": 1\n' for number in range(300))
    path.write_text(names + f"memory: {'x' * 100_000}\ndrain_grace_s: {'9' * 400}\n")
    reported = refusal(path)
    assert reported.isprintable()
    assert len(reported) < 16_000
    assert reported.endswith("and 282 more")


def test_a_socket_path_has_a_limit() -> None:
    longest = "/" + "d" * (SOCKET_PATH_BYTES_MAX - len("//attach.sock"))
    assert len(str(Settings(socket_dir=longest).attach_socket)) == SOCKET_PATH_BYTES_MAX
    assert "choose a shorter directory" in refusal(socket_dir=longest + "d")


def test_directories_are_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert Settings(socket_dir="run/../sockets").socket_dir == tmp_path / "sockets"


def test_tenants_have_whole_slabs() -> None:
    settings = Settings(memory="200MiB", allow_uids=[7, 5])
    assert settings.memory_bytes == 192 << 20
    assert settings.effective_tenants(5) == (TenantSetting("default", (5, 7), 192 << 20),)
    settings = Settings(tenants=["a=1,2:100MiB", "b-2=3:64MiB"])
    assert settings.effective_tenants(0) == (
        TenantSetting("a", (1, 2), 64 << 20),
        TenantSetting("b-2", (3,), 64 << 20),
    )
    assert parse_tenant(settings.tenants[0]) is settings.tenants[0]


def test_quotas_on_ssd_are_set_or_in_proportion_to_memory(tmp_path: Path) -> None:
    path = tmp_path / "kvhearth.yaml"
    path.write_text(
        f"socket_dir: /s\nssd_dirs: [{tmp_path}/one=8GiB]\n"
        "tenants: ['a=1:64MiB', {name: b, bytes: 192MiB}, 'c=3:64MiB:4GiB']\n"
    )
    settings = load_settings({}, path)
    assert settings.ssd_quotas() == {"a": 0.125, "b": 0.375, "c": 0.5}
    path.write_text(settings_yaml(settings))
    assert load_settings({}, path) == settings
    assert Settings().ssd_quotas() == {"default": 1.0}


def test_a_tenant_may_have_no_users(tmp_path: Path) -> None:
    """Only engines on other hosts use it; both forms are written as they are read."""
    path = tmp_path / "kvhearth.yaml"
    path.write_text(
        "socket_dir: /s\ntenants: [{name: a, uids: [], bytes: 64MiB}, {name: b, bytes: 64MiB}, "
        "{name: c, uids: [7, 8], bytes: 64MiB}, 'd=:64MiB']\n"
    )
    settings = load_settings({}, path)
    assert [each.uids for each in settings.tenants] == [(), (), (7, 8), ()]
    path.write_text(settings_yaml(settings))
    assert load_settings({}, path) == settings
    for row in ("{name: a}", "{name: a, bytes: 1GiB, uid: 7}", "{name: A, bytes: 1GiB}"):
        path.write_text(f"tenants: [{row}]\n")
        assert "name" in refusal(path)


def test_gateways_are_the_daemons_own_user_only_where_it_listens() -> None:
    assert Settings().effective_gateway_uids(5) == ()
    assert Settings(listen="127.0.0.1:9461").effective_gateway_uids(5) == (5,)
    assert Settings(gateway_uids=[7]).effective_gateway_uids(5) == (7,)
    assert Settings(gateway_uids=[7], listen="[::1]:0").effective_gateway_uids(5) == (7,)
