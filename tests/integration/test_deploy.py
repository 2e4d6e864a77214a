"""The files in deploy/, each checked with the tool that reads it."""

from __future__ import annotations

import json
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from support.daemon import until
from support.manifests import COMPOSE, DEPLOY, ENGINES, SIDECAR, default
from support.remote_servers import seaweed

from kvhearth.connectors.core.settings import URL_ENV, parse_settings
from kvhearth.connectors.vllm.adapter import VllmSettings
from kvhearth.url import parse_url
from kvhearth_lab.harness import HUNG_S
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
        timeout=HUNG_S,
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
    (daemon,), (engine,) = spec["initContainers"], spec["containers"]
    assert daemon["restartPolicy"] == "Always", "a native sidecar"
    assert "readinessProbe" not in daemon, "it would be the engine's, which fails open"
    settings = _settings({one["name"]: one["value"] for one in daemon["env"]})
    limits, requests = daemon["resources"]["limits"], daemon["resources"]["requests"]
    assert limits["hugepages-2Mi"] == requests["hugepages-2Mi"] == "8Gi"
    assert settings.memory_bytes < 8 << 30, "the catalogue and the journal need pages too"
    assert settings.hugepages == "require"
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
    daemon, gpu, cpu = (services[name] for name in ("kvhearth", "engine", "engine-cpu"))
    settings = _settings({n: default(v) for n, v in daemon["environment"].items()})
    places = {default(v).rsplit(":", 1)[-1] for v in daemon["volumes"]}
    assert {str(settings.arena_dir), str(settings.socket_dir)} <= places
    assert settings.ssd_dirs == (), "none until it is asked for"
    assert "ports" not in daemon, "HTTP stays on the network of this file"
    waits_for = gpu["depends_on"]["kvhearth"]["condition"]
    assert waits_for == "service_started", "an engine computes without a healthy daemon"
    assert cpu["command"] == gpu["command"]
    assert cpu["environment"].items() >= gpu["environment"].items()
    for service in services.values():
        assert set(service.get("depends_on", {})) <= set(services)
        sources = [default(volume).split(":")[0] for volume in service["volumes"]]
        named = [source for source in sources if source[0] not in "./"]
        assert set(named) <= set(loaded["volumes"])
        assert all((DEPLOY / one).exists() for one in sources if one.startswith("."))
    (job,) = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())["scrape_configs"]
    ((target,),) = [each["targets"] for each in job["static_configs"]]
    host, _, port = target.partition(":")
    assert str(services[host]["environment"]["KVHEARTH_HTTP"]).endswith(f":{port}")


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
        until(lambda: Machine().remote_problem(parse_remote(url), key) == "", "it works")
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
    # Without a commit, only one run of the engine could use the KV.
    assert re.search(r"--revision[ =][0-9a-f]{40}\b", " ".join(engine.words))


def test_an_engines_image_holds_the_connector() -> None:
    """It is installed from this checkout: no index has the package yet."""
    text = (DEPLOY / "engine.Dockerfile").read_text()
    lines = [line for line in text.splitlines() if line.startswith("COPY")]
    copied = {word for line in lines for word in line.split()[1:-1]}
    main = (ROOT / "Dockerfile").read_text()
    built = next(line for line in main.splitlines() if line.startswith("COPY pyproject")).split()
    assert {*built[1:-1], "client", "server"} == copied, "what the wheel is built of"
    (tag,) = re.findall(
        r"docker build -t (\S+) -f deploy/engine.Dockerfile \.$", text, re.MULTILINE
    )
    for make in ENGINES.values():
        assert make().image == f"{tag}:latest"
    services = yaml.safe_load(COMPOSE.read_text())["services"]
    for name in ("engine", "engine-cpu"):
        assert (ROOT / services[name]["build"]["dockerfile"]).samefile(DEPLOY / "engine.Dockerfile")
    assert default(services["engine-cpu"]["build"]["args"]["BASE"]) in text


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
    named = {metric.name for metric in TABLE if metric.use.startswith("Alert:")}
    alerts = set(re.findall(r"\bkvhearth_\w+", _expressions(PROMETHEUS / "alerts.yml")))
    assert named - alerts == set()


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


def test_the_dashboard_asks_for_metrics_and_labels_that_there_are(tmp_path: Path) -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    assert len(panels) > 20
    documented = (ROOT / "docs/metrics.md").read_text()
    recorded = {rule["record"] for rule in _rules(PROMETHEUS / "rules.yml")}
    queries = []
    for panel in panels:
        assert panel["datasource"]["uid"] == "${datasource}"
        for target in panel["targets"]:
            query = target["expr"]
            for name, value in (("$__rate_interval", "20s"), ("$__range", "1m")):
                query = query.replace(name, value)
            queries.append(query.replace("$instance", ".*"))
            assert "$" not in queries[-1]
            for name in re.findall(r"\bkvhearth[\w:]+", query):
                family = re.sub(r"_(bucket|sum|count)$", "", name)
                known = {name, family} & recorded or any(
                    f"`{each}`" in documented for each in (name, family)
                )
                assert known, f"{panel['title']}: {name}"
    rules = [{"record": f"panel:{number}", "expr": each} for number, each in enumerate(queries)]
    (tmp_path / "rules.yml").write_text(
        yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]})
    )
    _run(_tool("promtool", "prometheus"), "check", "rules", tmp_path / "rules.yml")


# -- what the image installs -----------------------------------------------------------------------


def _locked(name: str) -> list[tuple[Requirement, int]]:
    """Returns each requirement of a lock, and how many hashes it has."""
    text = (DEPLOY / "docker" / name).read_text().replace("\\\n", " ")
    found = []
    for line in text.splitlines():
        requirement, *hashes = line.split("--hash=sha256:")
        found.append((Requirement(requirement.strip()), len(hashes)))
    return found


def test_a_lock_names_versions_and_hashes_and_no_host() -> None:
    for name in ("requirements.lock", "remote.lock", "build.lock"):
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


def test_a_package_that_was_passed_over_is_not_checked() -> None:
    report = {
        "dependencies": [
            {"name": "a", "version": "1", "vulns": []},
            {"name": "b", "version": "2", "vulns": [{"id": "X-1"}, {"id": "X-2"}]},
            {"name": "c", "skip_reason": "Dependency not found on PyPI"},
        ]
    }
    found = runpy.run_path(str(DEPLOY / "advisories.py"))["verdict_of"](report)
    assert (found.found, found.unchecked, found.checked) == ({"b 2": ["X-1", "X-2"]}, ["c"], 2)


def test_without_its_tool_nothing_counts_as_checked() -> None:
    """pip-audit is not in this environment."""
    command = [sys.executable, str(DEPLOY / "advisories.py"), "deploy/docker/requirements.lock"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 3
    assert "NOT CHECKED" in done.stdout
    assert subprocess.run([*command, "--allow-offline"], cwd=ROOT, check=False).returncode == 0
