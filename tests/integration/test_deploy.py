"""The files in deploy/, each checked with the tool that reads it."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import tomllib
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.error import URLError
from urllib.parse import quote

import pytest
import yaml
from packaging.requirements import Requirement
from support.daemon import Daemon, running_daemon, until
from support.http_door import ANY_PORT, address_of
from support.manifests import COMPOSE, DEPLOY, ENGINES, SIDECAR, default
from support.raw_door import new_keys
from support.remote_servers import seaweed

from kvhearth.connectors.core.settings import URL_ENV, parse_settings
from kvhearth.connectors.vllm.adapter import VllmSettings
from kvhearth.url import parse_url
from kvhearth_lab.harness.engine import contract_of, engine_of
from kvhearth_server.cli.machine import Machine
from kvhearth_server.config.load import ENV_PREFIX, Settings
from kvhearth_server.config.value_types import parse_size
from kvhearth_server.observability.metrics import TABLE
from kvhearth_server.tiers.remote.url import parse_remote

ROOT = Path(__file__).resolve().parents[2]
UNIT = DEPLOY / "systemd/kvhearth.service"
PROMETHEUS = DEPLOY / "prometheus"
RULES = (PROMETHEUS / "alerts.yml", PROMETHEUS / "rules.yml")
DASHBOARD = DEPLOY / "grafana/kvhearth.json"
SCHEMAS = ROOT / ".venv-tools/bin/kubernetes-validate"
EXPOSURE_MAX = 20
"""Upper bound on systemd's exposure level, in tenths; a level below 2.0 is shown green."""


def _tool(name: str, package: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not there (Debian package {package})")
    return found


def _run(*words: object, folder: Path | None = None) -> str:
    """Returns the output of a command that must succeed."""
    done = subprocess.run(
        [str(word) for word in words],
        cwd=folder,
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def _settings(environment: dict[str, str]) -> Settings:
    """Returns the daemon's settings in an environment; every variable must be a setting."""
    values = {name.removeprefix(ENV_PREFIX).lower(): value for name, value in environment.items()}
    assert all(name.startswith(ENV_PREFIX) for name in environment)
    return Settings(**values)  # type: ignore[arg-type]


# -- systemd ---------------------------------------------------------------------------------------


@pytest.fixture
def unit(tmp_path: Path) -> Path:
    """The unit with an existing program in place of ours, since systemd looks for it."""
    text = UNIT.read_text()
    place = tmp_path / UNIT.name
    place.write_text(text.replace("/opt/kvhearth/bin/kvhearth", shutil.which("true") or ""))
    return place


def test_systemd_takes_the_unit(unit: Path) -> None:
    assert _run(_tool("systemd-analyze", "systemd"), "verify", "--man=no", unit).strip() == ""


def test_the_unit_is_hardened(unit: Path) -> None:
    tool = _tool("systemd-analyze", "systemd")
    help_text = subprocess.run([tool, "--help"], check=False, capture_output=True, text=True).stdout
    if "--offline" not in help_text:
        pytest.skip("this systemd-analyze judges no files (before version 250)")
    _run(tool, "security", "--offline=yes", f"--threshold={EXPOSURE_MAX}", unit)


def test_the_units_settings_are_ours() -> None:
    text = UNIT.read_text()
    words = re.findall(r"^Environment=(.*)$", text, flags=re.MULTILINE)
    found = dict(word.split("=", 1) for line in words for word in line.split())
    assert _settings(found).socket_dir == Path("/run/kvhearth")
    for line in ("Type=notify", "LimitMEMLOCK=infinity", "RuntimeDirectory=kvhearth"):
        assert line in text.splitlines()


# -- Kubernetes ------------------------------------------------------------------------------------


def test_kubernetes_schemas_take_the_sidecar() -> None:
    if not SCHEMAS.exists():
        pytest.skip("kubernetes-validate is not there: run `make tools`")
    assert "passed" in _run(SCHEMAS, "--strict", SIDECAR)


def test_the_sidecar_starts_first_and_has_its_huge_pages() -> None:
    spec = yaml.safe_load(SIDECAR.read_text())["spec"]
    (daemon,) = spec["initContainers"]
    assert daemon["restartPolicy"] == "Always", "a native sidecar"
    assert daemon["startupProbe"]
    assert daemon["livenessProbe"]
    assert "readinessProbe" not in daemon, "it would be the engine's, which fails open"
    settings = _settings({one["name"]: one["value"] for one in daemon["env"]})
    limits, requests = daemon["resources"]["limits"], daemon["resources"]["requests"]
    assert limits["hugepages-2Mi"] == requests["hugepages-2Mi"] == "8Gi"
    assert settings.memory_bytes < 8 << 30, "the catalogue and the journal need pages too"
    assert settings.hugepages == "require"
    assert daemon["securityContext"]["readOnlyRootFilesystem"] is True
    (engine,) = spec["containers"]
    assert [mount["name"] for mount in engine["volumeMounts"]] == ["sockets", "models"]
    assert engine["readinessProbe"]["httpGet"]["port"] == engine["ports"][0]["name"]
    assert settings.allow_uids == (engine["securityContext"]["runAsUser"],)
    volumes = {volume["name"] for volume in spec["volumes"]}
    assert {mount["name"] for mount in daemon["volumeMounts"]} == volumes - {"models"}
    assert spec["securityContext"]["fsGroup"] == daemon["securityContext"]["runAsGroup"]
    assert spec["securityContext"]["fsGroupChangePolicy"] == "OnRootMismatch"


def test_the_sidecars_ssd_tier_is_a_few_lines(tmp_path: Path) -> None:
    text = SIDECAR.read_text().replace("#- ", "- ")
    spec = yaml.safe_load(text)["spec"]
    (daemon,) = spec["initContainers"]
    settings = _settings({one["name"]: one["value"] for one in daemon["env"]})
    (place,) = settings.ssd_dirs
    (mount,) = [one for one in daemon["volumeMounts"] if one["name"] == "ssd"]
    assert place.path.parent == Path(mount["mountPath"]), "the daemon makes the last one"
    (volume,) = [one for one in spec["volumes"] if one["name"] == "ssd"]
    assert parse_size(volume["emptyDir"]["sizeLimit"]) > place.bytes
    if SCHEMAS.exists():
        with_ssd = tmp_path / SIDECAR.name
        with_ssd.write_text(text)
        assert "passed" in _run(SCHEMAS, "--strict", with_ssd)


# -- compose ---------------------------------------------------------------------------------------


def test_compose() -> None:
    loaded: dict[str, Any] = yaml.safe_load(COMPOSE.read_text())
    services = loaded["services"]
    wanted = {"arena", "kvhearth", "engine", "engine-cpu", "prometheus", "grafana"}
    assert set(services) == wanted
    daemon = services["kvhearth"]
    settings = _settings({n: default(v) for n, v in daemon["environment"].items()})
    assert settings.arena_dir == Path("/arena")
    assert daemon["read_only"] is True
    assert daemon["cap_drop"] == ["ALL"]
    assert "ports" not in daemon, "HTTP stays on the network of this file"
    assert {default(v).rsplit(":", 1)[-1] for v in daemon["volumes"]} == {
        "/run/kvhearth",
        "/arena",
        "/ssd",
    }
    assert settings.ssd_dirs == (), "none until it is asked for"
    needs = ["run:/run/kvhearth", "models:/root/.cache/huggingface"]
    assert services["engine"]["volumes"] == needs, "of the daemon it needs the sockets only"
    waits_for = services["engine"]["depends_on"]["kvhearth"]["condition"]
    assert waits_for == "service_started", "an engine computes without a healthy daemon"
    profiles = {name: services[name]["profiles"] for name in ("engine", "engine-cpu")}
    assert profiles == {"engine": ["engine"], "engine-cpu": ["cpu"]}
    gpu, cpu = services["engine"], services["engine-cpu"]
    assert cpu["command"] == gpu["command"]
    assert cpu["environment"].items() >= gpu["environment"].items()
    for service in services.values():
        assert set(service.get("depends_on", {})) <= set(services)
        sources = [default(volume).split(":")[0] for volume in service["volumes"]]
        named = [source for source in sources if source[0] not in "./"]
        assert set(named) <= set(loaded["volumes"])
        assert all((DEPLOY / one).exists() for one in sources if one.startswith("."))
    assert (DEPLOY / services["kvhearth"]["build"]["context"] / "Dockerfile").exists()


def test_compose_with_a_remote(tmp_path: Path) -> None:
    """Its secrets are made by its own program, its SeaweedFS runs with its own words, and the
    daemon's URL reaches it.
    """
    loaded = yaml.safe_load((DEPLOY / "compose.remote.yaml").read_text())
    services = loaded["services"]
    daemon, server, first = (services[name] for name in ("kvhearth", "seaweedfs", "remote-secrets"))
    assert daemon["build"]["args"] == first["build"]["args"] == {"EXTRAS": "server,remote"}
    base = yaml.safe_load(COMPOSE.read_text())["services"]["kvhearth"]
    settings = _settings({n: default(v) for n, v in (base | daemon)["environment"].items()})
    assert settings.remote_fleet_key_file == Path("/remote/fleet.key")
    for service in (daemon, server, first):
        assert {volume.split(":")[0] for volume in service["volumes"]} <= set(loaded["volumes"])

    (place := tmp_path / "remote").mkdir()
    (program,) = first["command"]
    assert "import json, os, secrets" in program
    program = program.replace('"/remote"', repr(str(place))).replace("os.chown(", "print(")
    for _ in range(2):  # a second start keeps them
        exec(compile(program, "compose.remote.yaml", "exec"), {})
    assert len((place / "fleet.key").read_text()) == 64
    made = seaweed(tmp_path / "weed")
    words = [word.replace("/remote", str(place)) for word in server["command"]]
    ours = ("-dir=", "-ip", "-master.port", "-volume.port", "-filer.port", "-s3.port")
    placed = [word for word in made.command if str(word).startswith(ours)]
    kept = [word for word in words if not word.startswith(("-dir=", "-ip"))]
    made.command = [made.command[0], *kept, *placed]
    url = settings.remote.replace("seaweedfs:8333", f"127.0.0.1:{made.port}")
    url = url.replace("/remote/credentials", str(place / "credentials"))
    made.start()
    try:
        key = (place / "fleet.key").read_bytes()
        until(lambda: Machine().remote_problem(parse_remote(url), key) == "", "it works", 60)
        assert "another key" in Machine().remote_problem(parse_remote(url), b"k" * 32)
    finally:
        made.stop()


# -- engines ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_uses_the_daemon_beside_it(name: str) -> None:
    """Its arguments name the connector, its environment the daemon, at the path of their shared
    volume; the connector reads each of our variables.
    """
    engine = ENGINES[name]()
    transfer = engine.transfer
    assert transfer["kv_connector"] == "KVHearthConnector"
    assert transfer["kv_role"] == "kv_both"
    assert transfer["kv_load_failure_policy"] == "recompute"
    assert [one for one in engine.environment if one.startswith(ENV_PREFIX)] == [URL_ENV]
    settings = parse_settings(
        VllmSettings, transfer.get("kv_connector_extra_config", {}), engine.environment
    )
    folder = parse_url(settings.url).socket_dir
    ((volume, place),) = [one for one in engine.mounts.items() if folder.is_relative_to(one[1])]
    served = Path(engine.daemon_mounts[volume]) / folder.relative_to(place)
    assert served == _settings(engine.daemon_environment).socket_dir


@pytest.mark.parametrize("name", ENGINES)
def test_an_engines_weights_have_a_name(name: str) -> None:
    """Without a commit, only one run of the engine could use the KV."""
    words = " ".join(ENGINES[name]().words)
    assert re.search(r"--revision[ =][0-9a-f]{40}\b", words)


def test_an_engines_image_holds_the_connector() -> None:
    """It is installed from this checkout: no index has the package yet."""
    text = (DEPLOY / "engine.Dockerfile").read_text()
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert [line.split()[0] for line in lines] == ["ARG", "FROM", "COPY", "COPY", "COPY", "RUN"]
    copied = {word for line in lines for word in line.split()[1:-1] if line.startswith("COPY")}
    assert all((ROOT / word).exists() for word in copied)
    main = (ROOT / "Dockerfile").read_text()
    built = next(line for line in main.splitlines() if line.startswith("COPY pyproject")).split()
    assert {*built[1:-1], "client", "server"} == copied, "what the wheel is built of"
    assert lines[-1].split()[-1] == "/src"
    (tag,) = re.findall(
        r"docker build -t (\S+) -f deploy/engine.Dockerfile \.$", text, re.MULTILINE
    )
    for make in ENGINES.values():
        assert make().image == f"{tag}:latest"
    services = yaml.safe_load(COMPOSE.read_text())["services"]
    for name in ("engine", "engine-cpu"):
        build = services[name]["build"]
        assert (DEPLOY / build["context"]).samefile(ROOT)
        assert (ROOT / build["dockerfile"]).samefile(DEPLOY / "engine.Dockerfile")
    cpu = default(services["engine-cpu"]["build"]["args"]["BASE"])
    assert cpu in text, "the recipe for one's own hands"
    assert cpu.rpartition(":")[2] == lines[0].rpartition(":")[2], "the same vLLM"


def test_grafana_finds_prometheus_and_dashboards() -> None:
    folder = DEPLOY / "grafana/provisioning"
    services = yaml.safe_load(COMPOSE.read_text())["services"]
    (source,) = yaml.safe_load((folder / "datasources/prometheus.yaml").read_text())["datasources"]
    host, _, port = source["url"].removeprefix("http://").partition(":")
    assert services[host]["ports"] == [f"127.0.0.1:{port}:{port}"]
    (found,) = yaml.safe_load((folder / "dashboards/kvhearth.yaml").read_text())["providers"]
    mounts = dict(each.split(":")[:2] for each in services["grafana"]["volumes"])
    assert mounts["./grafana"] == found["options"]["path"]
    assert mounts["./grafana/provisioning"] == "/etc/grafana/provisioning"


# -- the compose specification ---------------------------------------------------------------------

_PARSE_COMPOSE = "import sys, compose_spec as c; c.PyCompose.from_yaml(sys.stdin.read()).validate()"


def test_the_compose_specification_takes_the_file() -> None:
    """Unknown keys, malformed values, and missing volumes or services are rejected."""
    python = ROOT / ".venv-tools/bin/python"
    probe = [str(python), "-c", "import compose_spec"]
    if not python.exists() or subprocess.run(probe, check=False, capture_output=True).returncode:
        pytest.skip("compose-spec is not there: run `make tools`")
    # The parser knows no merge keys (<<), which compose takes.
    text = yaml.safe_dump(yaml.safe_load(default(COMPOSE.read_text())))
    for given, good in ((text, True), (text.replace("depends_on", "dependson"), False)):
        done = subprocess.run(
            [python, "-c", _PARSE_COMPOSE], input=given, capture_output=True, text=True, check=False
        )
        assert (done.returncode == 0) == good, done.stderr


def test_compose_makes_the_directories_with_what_the_image_holds(tmp_path: Path) -> None:
    """The image has no shell and no tools: this service's commands run in Python, as root there."""
    service = yaml.safe_load(COMPOSE.read_text())["services"]["arena"]
    assert service["entrypoint"] == ["python3", "-c"]
    (program,) = service["command"]
    owned = []
    names = {"chown": lambda path, *ids: owned.append((path, *ids))}
    places = [tmp_path / "host/kvhearth", tmp_path / "ssd/kvhearth"]
    for place in places:
        place.parent.mkdir()
        program = program.replace(f"/{place.parent.name}/", f"{place.parent}/")
    program = program.replace("os.chown", "chown")
    for _ in range(2):
        exec(compile(program, "compose.yaml", "exec"), names)
    assert [place.stat().st_mode & 0o7777 for place in places] == [0o700, 0o700]
    assert owned == [(str(place), 65532, 65532) for place in places] * 2


def test_what_compose_scrapes_is_its_daemon() -> None:
    services = yaml.safe_load(COMPOSE.read_text())["services"]
    (job,) = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())["scrape_configs"]
    ((target,),) = [each["targets"] for each in job["static_configs"]]
    host, _, port = target.partition(":")
    assert str(services[host]["environment"]["KVHEARTH_HTTP"]).endswith(f":{port}")


# -- Prometheus ------------------------------------------------------------------------------------


def test_promtool_takes_configuration_and_rules() -> None:
    tool = _tool("promtool", "prometheus")
    _run(tool, "check", "config", PROMETHEUS / "prometheus.yml")
    _run(tool, "check", "rules", *RULES)
    _run(tool, "test", "rules", "alerts_test.yml", folder=PROMETHEUS)


def test_alerts_are_about_metrics_that_there_are() -> None:
    used = set(re.findall(r"\bkvhearth_\w+", _expressions(*RULES)))
    documented = (ROOT / "docs/metrics.md").read_text()
    assert used
    assert [name for name in used if f"`{name}`" not in documented] == []


def test_each_alert_of_the_documentation_is_a_rule() -> None:
    named = {metric.name for metric in TABLE if metric.use.startswith("Alert:")}
    assert (
        named - set(re.findall(r"\bkvhearth_\w+", _expressions(PROMETHEUS / "alerts.yml"))) == set()
    )


def test_each_alert_says_what_to_do_and_is_tested() -> None:
    (group,) = yaml.safe_load((PROMETHEUS / "alerts.yml").read_text())["groups"]
    tested = (PROMETHEUS / "alerts_test.yml").read_text()
    for rule in group["rules"]:
        assert {"summary", "description", "runbook"} == rule["annotations"].keys(), rule["alert"]
        assert f'"{rule["alert"]}"' in tested


def _rules(*files: Path) -> list[dict[str, Any]]:
    groups = [group for file in files for group in yaml.safe_load(file.read_text())["groups"]]
    return [rule for group in groups for rule in group["rules"]]


def _expressions(*files: Path) -> str:
    return " ".join(rule["expr"] for rule in _rules(*files))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Prometheus:
    """A real Prometheus that scrapes ``target`` once a second by our configuration."""

    def __init__(self, tool: str, folder: Path, target: str) -> None:
        self.port = _free_port()
        for rules in RULES:
            shutil.copy(rules, folder)
        config = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
        config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        config["scrape_configs"][0]["static_configs"] = [{"targets": [target]}]
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        words = [
            tool,
            f"--config.file={folder}/prometheus.yml",
            f"--storage.tsdb.path={folder}/data",
            f"--web.listen-address=127.0.0.1:{self.port}",
        ]
        self._log = (folder / "log").open("wb")
        self.process = subprocess.Popen(words, stdout=self._log, stderr=self._log, cwd=folder)

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Returns the samples of an instant query; none while Prometheus starts."""
        url = f"http://127.0.0.1:{self.port}/api/v1/query?query={quote(expression)}"
        try:
            with urllib.request.urlopen(url, timeout=5) as reply:
                return list(json.load(reply)["data"]["result"])
        except (URLError, ConnectionError, TimeoutError):
            return []

    def value(self, expression: str) -> float | None:
        """Returns the value of the one sample; None if there is none."""
        found = self.query(expression)
        return float(found[0]["value"][1]) if found else None

    def close(self) -> None:
        """Ends it by its process id."""
        self.process.kill()
        self.process.wait()
        self._log.close()


@pytest.fixture
def folder() -> Iterator[Path]:
    place = Path(tempfile.mkdtemp(prefix="kvh-prom-"))
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)


@pytest.fixture
def scraped_daemon(folder: Path, tmp_path: Path) -> Iterator[tuple[Daemon, Prometheus]]:
    """A daemon with all tiers and an engine that stores and loads, scraped by a Prometheus."""
    tool = _tool("prometheus", "prometheus")
    (tmp_path / "remote").mkdir()
    settings = {
        "http": ANY_PORT,
        "ssd_dirs": [f"{tmp_path}/log=512MiB"],
        "remote": f"file://{tmp_path}/remote",
    }
    with (
        running_daemon(**settings) as daemon,
        engine_of(daemon.url(), contract_of(65536)) as engine,
    ):
        keys = new_keys(8)
        engine.store(keys)
        host, port = address_of(daemon)
        scraper = Prometheus(tool, folder, f"{host}:{port}")
        try:
            until(lambda: scraper.value("up") == 1, "the scrape works", 60)
            for _ in range(8):  # rates need a rise between scrapes
                engine.store(new_keys(40))
                engine.check(keys + new_keys(2), prefetch=True)
                time.sleep(0.5)
            yield daemon, scraper
        finally:
            scraper.close()


def test_a_real_prometheus_scrapes_a_live_daemon(
    scraped_daemon: tuple[Daemon, Prometheus],
) -> None:
    daemon, scraper = scraped_daemon
    until(lambda: scraper.value("kvhearth_ready") == 1, "it says that it is ready")
    for name in sorted(set(re.findall(r"\bkvhearth_\w+", _expressions(*RULES)))):
        until(lambda name=name: scraper.query(name), f"{name} is scraped")
    for rule in _rules(PROMETHEUS / "rules.yml"):
        until(lambda rule=rule: scraper.query(rule["record"]), f"{rule['record']} is recorded")
    damaged = 'ALERTS{alertname="KVHearthChecksumFailures"}'
    assert scraper.query(damaged) == [], "counters at zero are no failures"
    small = 'ALERTS{alertname="KVHearthNotOnHugepages"}'
    until(lambda: scraper.query(small), "small pages are noticed", 60)
    daemon.kill()
    gone = 'ALERTS{alertname="KVHearthNotReady"}'
    until(lambda: scraper.query(gone), "a dead daemon is noticed", 60)


def test_a_real_prometheus_answers_every_query_of_the_dashboard(
    scraped_daemon: tuple[Daemon, Prometheus],
) -> None:
    _, scraper = scraped_daemon
    dashboard = json.loads(DASHBOARD.read_text())
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    variables = {"$instance": ".*", "$__rate_interval": "20s", "$__range": "1m"}
    assert len(panels) > 20
    for panel in panels:
        assert panel["datasource"]["uid"] == "${datasource}"
        for target in panel["targets"]:
            query = target["expr"]
            for name, value in variables.items():
                query = query.replace(name, value)
            assert "$" not in query
            until(lambda query=query: scraper.query(query), f"{panel['title']}: {query}", 60)
            labels = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            assert labels <= scraper.query(query)[0]["metric"].keys(), panel["title"]


# -- what the image installs -----------------------------------------------------------------------

LOCKS = ("requirements.lock", "remote.lock", "build.lock")


def _locked(name: str) -> list[tuple[Requirement, int]]:
    """Returns each requirement of a lock, and how many hashes it has."""
    text = (DEPLOY / "docker" / name).read_text().replace("\\\n", " ")
    found = []
    for line in text.splitlines():
        requirement, *hashes = line.split("--hash=sha256:")
        found.append((Requirement(requirement.strip()), len(hashes)))
    return found


@pytest.mark.parametrize("name", LOCKS)
def test_a_lock_names_versions_and_hashes_and_no_host(name: str) -> None:
    locked = _locked(name)
    assert len(locked) > 3
    for requirement, hashes in locked:
        assert hashes > 0, requirement
        assert [each.operator for each in requirement.specifier] == ["=="], requirement
    text = (DEPLOY / "docker" / name).read_text()
    assert "://" not in text
    assert [line for line in text.splitlines() if line.startswith(("-", "#"))] == []


@pytest.mark.parametrize("name", ["requirements.lock", "remote.lock"])
def test_the_lock_is_of_what_the_project_asks_for(name: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["server"]]
    if name == "remote.lock":
        wanted += [*extras["s3"], *extras["valkey"]]
    wanted = [each for each in wanted if each != "kvhearth[server]"]
    locked = {each.name: each.specifier for each, _ in _locked(name)}
    plain = {each.name: each.specifier for each, _ in _locked("requirements.lock")}
    assert locked.items() >= plain.items(), "both images have the same versions"
    for requirement in map(Requirement, wanted):
        (version,) = locked[requirement.name]
        assert requirement.specifier.contains(version.version), f"{requirement}: run make update"


def test_every_direct_dependency_has_a_floor() -> None:
    """`make test-floors` runs the lowest versions that are named here."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for text in (*project["dependencies"], *project["optional-dependencies"]["server"]):
        operators = {each.operator for each in Requirement(text).specifier}
        assert ">=" in operators, text


def _advisories() -> ModuleType:
    spec = importlib.util.spec_from_file_location("kvhearth_advisories", DEPLOY / "advisories.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_a_package_that_was_passed_over_is_not_checked() -> None:
    report = {
        "dependencies": [
            {"name": "a", "version": "1", "vulns": []},
            {"name": "b", "version": "2", "vulns": [{"id": "X-1"}, {"id": "X-2"}]},
            {"name": "c", "skip_reason": "Dependency not found on PyPI"},
        ]
    }
    found = _advisories().verdict_of(report)
    assert (found.found, found.unchecked, found.checked) == ({"b 2": ["X-1", "X-2"]}, ["c"], 2)


def test_without_its_tool_nothing_counts_as_checked() -> None:
    """pip-audit is not in this environment."""
    command = [sys.executable, str(DEPLOY / "advisories.py"), "deploy/docker/requirements.lock"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 3
    assert "NOT CHECKED" in done.stdout
    assert subprocess.run([*command, "--allow-offline"], cwd=ROOT, check=False).returncode == 0
