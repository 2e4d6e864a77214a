"""The Helm chart and the examples: rendered by Helm, judged by Kubernetes' schemas, and run."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.cached import cached_engine
from support.daemon import running_daemon
from support.manifests import DEPLOY
from support.memory_places import HUGE, on_hugetlbfs
from support.raw_door import new_keys

from kvhearth.connectors.core.settings import parse_settings
from kvhearth.connectors.vllm.adapter import VllmSettings
from kvhearth.url import UnixUrl, parse_url
from kvhearth_server.config.load import ENV_PREFIX, Settings
from kvhearth_server.config.value_types import parse_size
from kvhearth_server.tiers.remote.url import parse_remote

ROOT = DEPLOY.parent
CHART = DEPLOY / "helm/kvhearth"
TOOLS = ROOT / ".venv-tools/bin"
RENDER = ROOT / "tests/support/helm_render.py"
EVERYTHING = {"ssd": {"enabled": True}, "podMonitor": {"enabled": True}}
REMOTE = {
    "url": "s3://bucket/kv?region=r&secret_file=/remote/credentials",
    "secretName": "kvhearth-remote",
}
VARIANTS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "all": EVERYTHING,
    "hugepages": {"hugepages": {"enabled": True}, "host": {"arena": "/dev/hugepages/kvhearth"}},
    "sidecar": {"mode": "sidecar"},
    "sidecar-all": {"mode": "sidecar", "hugepages": {"enabled": True}, **EVERYTHING},
    "remote": {"remote": {**REMOTE, "serviceAccountName": "kv", "stagingMiB": 512}},
    "sidecar-remote": {"mode": "sidecar", "remote": REMOTE},
    "placed": {
        "nodeSelector": {"gpu": "yes"},
        "tolerations": [{"operator": "Exists"}],
        "priorityClassName": "system-node-critical",
        "podAnnotations": {"a": "b"},
        "settings": {"KVHEARTH_LOG_LEVEL": "debug", "KVHEARTH_SESSIONS_MAX": 64},
    },
}


def helm(wanted: object) -> subprocess.CompletedProcess[str]:
    """Run Helm's library on the chart: ``lint``, or values to render it with."""
    probe = [TOOLS / "python", "-c", "import helm_python"]
    if not TOOLS.exists() or subprocess.run(probe, check=False, capture_output=True).returncode:
        pytest.skip("Helm's library is not there: run `make tools`")
    text = wanted if isinstance(wanted, str) else json.dumps(wanted)
    return subprocess.run(
        [TOOLS / "python", RENDER, CHART, text], capture_output=True, text=True, check=False
    )


def rendered(values: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the rendered objects by kind."""
    done = helm(values)
    assert done.returncode == 0, done.stderr
    texts = [text for name, text in json.loads(done.stdout).items() if name.endswith(".yaml")]
    found = [each for text in texts for each in yaml.safe_load_all(text) if each]
    kinds = {each["kind"]: each for each in found}
    assert len(kinds) == len(found)
    return kinds


def check_schemas(folder: Path, *objects: dict[str, Any]) -> None:
    """Fail unless Kubernetes' schemas, strictly, take the objects."""
    for number, each in enumerate(objects):
        place = folder / f"{number}.yaml"
        place.write_text(yaml.safe_dump(each))
        done = subprocess.run(
            [TOOLS / "kubernetes-validate", "--strict", place],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{each['kind']}: {done.stdout}{done.stderr}"


def pod_of(kinds: dict[str, dict[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the pod's specification, and the daemon's container in it."""
    owner = kinds.get("DaemonSet") or kinds["Deployment"]
    spec: dict[str, Any] = owner["spec"]["template"]["spec"]
    (daemon,) = [
        each for each in spec["containers"] + spec["initContainers"] if each["name"] == "kvhearth"
    ]
    return spec, daemon


def environment_of(container: dict[str, Any]) -> dict[str, str]:
    return {each["name"]: each["value"] for each in container["env"]}


def settings_of(container: dict[str, Any]) -> Settings:
    values = environment_of(container).items()
    return Settings(**{n.removeprefix(ENV_PREFIX).lower(): v for n, v in values})  # type: ignore[arg-type]


def test_helm_finds_nothing_wrong() -> None:
    found = json.loads(helm("lint").stdout)
    assert found["errors"] == []
    assert [each for each in found["messages"] if each["severity"] > 1] == []


@pytest.mark.parametrize("values", VARIANTS.values(), ids=VARIANTS)
def test_kubernetes_takes_what_it_renders(values: dict[str, Any], tmp_path: Path) -> None:
    kinds = rendered(values)
    owner = "Deployment" if values.get("mode") == "sidecar" else "DaemonSet"
    monitored = {"PodMonitor"} if "podMonitor" in values else set()
    assert set(kinds) == {owner, "NetworkPolicy", "PodDisruptionBudget"} | monitored
    check_schemas(tmp_path, *[each for kind, each in kinds.items() if kind != "PodMonitor"])
    labels = kinds[owner]["spec"]["template"]["metadata"]["labels"].items()
    for kind in {"NetworkPolicy", "PodDisruptionBudget"} | monitored:
        spec = kinds[kind]["spec"]
        chosen = spec.get("podSelector") or spec["selector"]
        assert chosen["matchLabels"].items() <= labels
    if monitored:
        (endpoint,) = kinds["PodMonitor"]["spec"]["podMetricsEndpoints"]
        ports = [port["name"] for port in pod_of(kinds)[1]["ports"]]
        assert endpoint["port"] in ports
    fits(*pod_of(kinds))


def fits(spec: dict[str, Any], daemon: dict[str, Any]) -> None:
    """Check that the daemon's settings fit its pod."""
    settings = settings_of(daemon)
    limits = daemon["resources"]["limits"]
    beside = settings.memory * 33 // 32 + (64 << 20)
    beside += settings.remote_staging * bool(settings.remote)
    if settings.hugepages == "require":
        needed = on_hugetlbfs(Settings(memory=settings.memory)) * HUGE
        assert parse_size(limits["hugepages-2Mi"]) >= needed
        assert limits["hugepages-2Mi"] == daemon["resources"]["requests"]["hugepages-2Mi"]
    else:
        assert parse_size(limits["memory"]) > beside, "a tmpfs is charged to who touches it"
    mounts = {each["name"]: Path(each["mountPath"]) for each in daemon["volumeMounts"]}
    volumes = {each["name"]: each for each in spec["volumes"]}
    assert mounts.keys() <= volumes.keys()
    assert settings.arena_dir is not None
    assert settings.arena_dir.is_relative_to(mounts["arena"])
    assert settings.socket_dir.is_relative_to(mounts["sockets"])
    assert [each.path.is_relative_to(mounts["ssd"]) for each in settings.ssd_dirs] in ([], [True])
    assert daemon["securityContext"]["readOnlyRootFilesystem"] is True


@pytest.mark.parametrize("mode", ["daemonset", "sidecar"])
def test_the_remotes_secrets_are_files_of_a_secret(mode: str) -> None:
    spec, daemon = pod_of(rendered({"mode": mode, "remote": REMOTE}))
    settings = settings_of(daemon)
    url = parse_remote(settings.remote)
    (mount,) = [each for each in daemon["volumeMounts"] if each["name"] == "remote"]
    key = settings.remote_fleet_key_file
    assert key is not None
    assert {key.parent, Path(url.secret_file).parent} == {Path(mount["mountPath"])}
    assert mount["readOnly"] is True
    (volume,) = [each for each in spec["volumes"] if each["name"] == "remote"]
    assert volume["secret"] == {"secretName": "kvhearth-remote", "defaultMode": 0o440}
    group = daemon["securityContext"]["runAsGroup"]
    assert spec["securityContext"]["fsGroup"] == group, "else the daemon could not read them"
    assert spec["securityContext"]["fsGroupChangePolicy"] == "OnRootMismatch"
    assert "remote" not in {each["name"] for each in pod_of(rendered({"mode": mode}))[0]["volumes"]}


def test_no_probe_ties_an_engine_to_the_daemon() -> None:
    spec, daemon = pod_of(rendered({"mode": "sidecar"}))
    assert daemon["restartPolicy"] == "Always"
    assert "readinessProbe" not in daemon
    (engine,) = spec["containers"]
    assert engine["readinessProbe"]["httpGet"]["path"] == "/health"
    assert engine["securityContext"]["runAsUser"] in settings_of(daemon).allow_uids
    url = parse_url(environment_of(engine)["KVHEARTH_URL"])
    assert isinstance(url, UnixUrl)
    assert url.socket_dir == settings_of(daemon).socket_dir
    assert "readinessProbe" in pod_of(rendered({}))[1], "its own pod's, not an engine's"


@pytest.mark.parametrize(
    ("values", "wrong"),
    [
        ({"memoryMiB": 100}, "/memoryMiB"),
        ({"mode": "statefulset"}, "/mode"),
        ({"memory": "4Gi"}, "memory"),
        ({"settings": {"MEMORY": "1"}}, "MEMORY"),
        ({"ssd": {"enabled": "yes"}}, "/ssd/enabled"),
        ({"remote": {"url": "bucket"}}, "/remote/url"),
        ({"remote": {"url": "s3://bucket"}}, "secretName"),
    ],
)
def test_the_schema_refuses_wrong_values(values: dict[str, Any], wrong: str) -> None:
    done = helm(values)
    assert done.returncode == 1
    assert wrong in done.stderr


def test_the_init_container_makes_directories_of_the_daemons_user(tmp_path: Path) -> None:
    spec, _ = pod_of(rendered(EVERYTHING))
    (first,) = spec["initContainers"]
    program, *words = first["args"]
    mounts = {each["mountPath"] for each in first["volumeMounts"]}
    assert {word.partition(":")[0] for word in words} == mounts
    owned = []
    places = [tmp_path / word.partition(":")[0].strip("/").replace("/", "-") for word in words]
    for place in places:
        place.mkdir(mode=0o777)
    argv = [f"{p}:{w.partition(':')[2]}" for p, w in zip(places, words, strict=True)]
    program = program.replace("os.chown", "chown").replace("sys.argv[1:]", "argv")
    names = {"chown": lambda path, *ids: owned.append((path, *ids)), "argv": argv}
    exec(compile(program, "daemonset.yaml", "exec"), names)
    assert [oct(place.stat().st_mode & 0o777) for place in places] == ["0o755", "0o700", "0o700"]
    assert owned == [(str(place), 65532, 65532) for place in places]


def test_the_rendered_daemon_serves_and_keeps_its_blocks() -> None:
    """The container's command as a plain process, its volumes as directories."""
    _, container = pod_of(rendered({"memoryMiB": 128}))
    assert container["args"] == ["serve"]
    values = environment_of(container)
    given = {name.removeprefix(ENV_PREFIX).lower(): value for name, value in values.items()}
    for placed in ("arena_dir", "socket_dir", "http", "http_insecure"):
        del given[placed]
    keys = new_keys(20)
    # An engine that another container's user runs, here this process's own.
    with running_daemon(command=True, http="127.0.0.1:0", **given) as daemon:
        with cached_engine(daemon.url()) as engine:
            assert engine.store(keys).stored == 20
        assert daemon.restart(), "another pod of the daemonset"
        with cached_engine(daemon.url()) as engine:
            assert engine.load(keys).loaded.all()


# -- examples --------------------------------------------------------------------------------------


def check_engine(words: list[str], environment: list[dict[str, str]]) -> None:
    """Fail unless an engine names the connector and the node's daemon."""
    transfer = json.loads(words[words.index("--kv-transfer-config") + 1])
    assert transfer["kv_connector"] == "KVHearthConnector"
    assert transfer["kv_load_failure_policy"] == "recompute"
    values = {each["name"]: each["value"] for each in environment}
    assert parse_url(parse_settings(VllmSettings, {}, values).url) == UnixUrl(Path("/run/kvhearth"))
    assert any(len(word.partition("--revision=")[2]) == 40 for word in words)


def test_examples_of_other_charts_are_pods(tmp_path: Path) -> None:
    """KServe hands a pod's specification to Kubernetes; the production stack's chart makes one."""
    served = yaml.safe_load((DEPLOY / "kserve/inferenceservice.yaml").read_text())
    kind = (served["apiVersion"], served["kind"])
    assert kind == ("serving.kserve.io/v1beta1", "InferenceService")
    predictor = dict(served["spec"]["predictor"])
    del predictor["minReplicas"]
    (engine,) = predictor["containers"]
    check_engine(engine["args"], engine["env"])
    loaded = yaml.safe_load((DEPLOY / "production-stack/values.yaml").read_text())
    (model,) = loaded["servingEngineSpec"]["modelSpec"]
    words = model["vllmConfig"]["extraArgs"]
    assert model["vllmConfig"]["enablePrefixCaching"] is True, "else its chart turns hashes off"
    check_engine(words, model["env"])
    container = {
        "name": "vllm",
        "image": f"{model['repository']}:{model['tag']}",
        "args": words,
        "env": model["env"],
        "volumeMounts": model["extraVolumeMounts"],
    }
    stack = {"containers": [container], "volumes": model["extraVolumes"]}
    if TOOLS.exists():
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}}
        check_schemas(tmp_path, *({**pod, "spec": spec} for spec in (predictor, stack)))
