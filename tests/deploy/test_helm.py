"""The Helm chart renders objects that Kubernetes and KubeRay accept and that fit what the pods run."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
import yaml

from deploy.config import ENV_PREFIX, load_config
from native.ownership import CACHE_VARIABLE
from protocol.config import ServeConfig
from protocol.roles import ROLES
from tests.cluster.hosts import ROOT
from tests.deploy.containers import of_dockerfile
from tests.deploy.helm import (
    HELM,
    INFERENCE_POOL,
    Object,
    RenderError,
    check,
    environment,
    groups,
    of_kind,
    render,
)

pytestmark = pytest.mark.skipif(not HELM.exists(), reason="helm is missing: deploy/install.sh test")

CASES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "decode workers alone": {"workers": {"prefill": {"replicas": 0}, "decode": {"replicas": 3}}},
    "growing": {
        "workers": {"prefill": {"replicas": 1, "maxReplicas": 4}, "decode": {"replicas": 2, "maxReplicas": 8}}
    },
    "everything": {
        "image": {"repository": "registry/tandem", "pullSecrets": ["pull"]},
        "model": {"name": "/models/a", "sizeGiB": 15.2, "kvCacheGiB": 8},
        "models": {"sizeGiB": 100, "storageClass": "nfs"},
        "secrets": {"huggingFace": "hub"},
        "options": {
            "max-model-len": 8192,
            "speculative-config": {"method": "draft_model", "model": "hub/draft"},
            "kv-cache-memory-bytes": 3000000000,
            "enable-prefix-caching": False,
        },
        "workers": {
            "prefill": {"replicas": 2, "nodeSelector": {"a": "b"}, "tolerations": [{"operator": "Exists"}]},
            "draft": {"replicas": 1},
        },
        "gpu": {"perWorker": 1},
        "rdma": {"resource": "rdma/hca"},
        "redis": {"address": "redis:6379", "secret": "redis"},
        "networkPolicy": {"clients": [{"podSelector": {"matchLabels": {"a": "b"}}}]},
        "serviceMonitor": True,
    },
    "secrets and a claim of one's own": {
        "secrets": {"auth": "mine"},
        "models": {"claim": "a", "readOnly": True},
    },
}


def rendered(case: str, upgrade: bool = False) -> list[Object]:
    return render(CASES[case], upgrade)


def config_of(objects: list[Object]) -> ServeConfig:
    """Return the configuration that the head's container gets."""
    (_, head), *_ = groups(objects)
    return load_config(environ={k: v for k, v in environment(head).items() if k.startswith(ENV_PREFIX)})


@pytest.mark.parametrize("upgrade", [False, True], ids=["install", "upgrade"])
@pytest.mark.parametrize("case", CASES)
def test_objects_match_the_schemas_of_their_kinds(case: str, upgrade: bool) -> None:
    check(rendered(case, upgrade))


@pytest.mark.parametrize("case", CASES)
def test_pods_are_confined_and_can_write_where_needed(case: str) -> None:
    for _, pod in groups(rendered(case)):
        (container,) = pod["containers"]
        assert pod["securityContext"]["runAsNonRoot"]
        assert f"{pod['securityContext']['runAsUser']}:1000" == of_dockerfile("USER")
        confined = container["securityContext"]
        assert confined["readOnlyRootFilesystem"] and not confined["allowPrivilegeEscalation"]
        assert confined["capabilities"]["drop"] == ["ALL"]
        empty = {volume["name"] for volume in pod["volumes"] if "emptyDir" in volume}
        written = {each["mountPath"] for each in container["volumeMounts"] if each["name"] in empty}
        assert written == {"/tmp", "/home/tandem", "/dev/shm"}
        assert container["command"] == json.loads(of_dockerfile("ENTRYPOINT"))
        assert {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH"} <= environment(pod).keys()
        assert container["resources"]["requests"] == container["resources"]["limits"]


@pytest.mark.parametrize("case", CASES)
def test_one_value_sets_the_nodes_and_the_workers_of_a_role(case: str) -> None:
    objects = rendered(case, upgrade=True)
    config = config_of(objects)
    _, *workers = groups(objects)
    deployed = {name: config.num_replicas(role) for name, role in ROLES.items() if config.num_replicas(role)}
    assert {group["groupName"]: group["replicas"] for group, _ in workers} == deployed
    for group, pod in workers:
        role = group["groupName"]
        assert pod["containers"][0]["args"] == [role]
        assert json.loads(json.loads(group["rayStartParams"]["resources"])) == {role: 1}
        bounds = (config.autoscale or {}).get(role)
        most = bounds.most if bounds else group["replicas"]
        assert (group["minReplicas"], group["maxReplicas"]) == (deployed[role], most)
    scaled = [job["spec"]["template"]["spec"]["containers"][0]["args"] for job in of_kind(objects, "Job")]
    assert scaled == (
        [] if config.autoscale else [[f"--{role}={count}" for role, count in sorted(deployed.items())]]
    )
    budgets = {
        each["metadata"]["name"]: each["spec"]["minAvailable"]
        for each in of_kind(objects, "PodDisruptionBudget")
    }
    left = {f"tandem-{role}": count - 1 for role, count in deployed.items() if count > 1}
    assert budgets == {"tandem-router": 1} | left


@pytest.mark.parametrize(
    ("models", "kept"),
    [
        ({}, False),
        ({"claim": "a"}, True),
        ({"sizeGiB": 100}, True),
        ({"claim": "a", "readOnly": True}, False),
        ({"claim": "a", "keepsKernels": False}, False),
    ],
)
def test_a_writable_claim_keeps_compiled_kernels(models: dict[str, Any], kept: bool) -> None:
    for _, pod in groups(render({"models": models})):
        variables = environment(pod)
        mounts = {
            each["mountPath"]: each.get("readOnly", False) for each in pod["containers"][0]["volumeMounts"]
        }
        assert (mounts.get("/models") is False) or not kept
        for name in (CACHE_VARIABLE, "TRITON_CACHE_DIR"):
            assert (name in variables) == kept and variables.get(name, "/models/cache/").startswith(
                "/models/cache/"
            )


def test_options_and_secrets_reach_the_server() -> None:
    objects = rendered("everything")
    config = config_of(objects)
    assert (config.max_model_len, config.kv_cache_memory_bytes) == (8192, 3_000_000_000)
    assert not config.enable_prefix_caching and config.speculative_config is not None
    assert (config.model, config.api_keys) == ("/models/a", ("secret",))
    for _, pod in groups(objects):
        assert environment(pod)["HF_TOKEN"] == "secret" and environment(pod)["HF_HOME"] == "/models/hub"
        assert pod["containers"][0]["image"] == "registry/tandem:cuda"


@pytest.mark.parametrize(
    ("model", "gpus", "memory"),
    [
        ({"sizeGiB": 1, "kvCacheGiB": 1}, 0, "4Gi"),
        ({"sizeGiB": 15.2, "kvCacheGiB": 8.5}, 0, "26Gi"),
        ({"sizeGiB": 15.2, "kvCacheGiB": 8.5}, 1, "18Gi"),
    ],
)
def test_workers_get_memory_for_the_model_and_its_kv(model: dict[str, float], gpus: int, memory: str) -> None:
    objects = render({"model": model, "gpu": {"perWorker": gpus}})
    _, *workers = groups(objects)
    for _, pod in workers:
        limits = pod["containers"][0]["resources"]["limits"]
        assert limits == {"cpu": "2", "memory": memory} | ({"nvidia.com/gpu": "1"} if gpus else {})
    config = config_of(objects)
    assert config.kv_cache_memory_bytes == (None if gpus else int(model["kvCacheGiB"] * 2**30))
    assert config.device == ("cuda" if gpus else "auto"), "a pod without its GPU must not serve on the CPU"


def test_the_router_is_ready_when_workers_serve_and_workers_find_it_before() -> None:
    objects = rendered("defaults")
    (head, pod), *workers = groups(objects)
    router = pod["containers"][0]
    paths = {name: router[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "readiness", "liveness")}
    assert paths == {"startup": "/health", "readiness": "/ready", "liveness": "/health"}
    assert head["headService"]["spec"]["publishNotReadyAddresses"]
    (service,) = of_kind(objects, "Service")
    assert service["spec"]["selector"] == {"ray.io/cluster": "tandem", "ray.io/node-type": "head"}
    ports = {each["name"]: each["containerPort"] for each in router["ports"]}
    assert ports == {"http": config_of(objects).port, "gcs-server": 6379}
    for _, worker in workers:
        (ray,) = worker["containers"][0]["ports"]
        assert ray == {"name": "ray", "containerPort": 6379 + 1}, "the node manager's, by deploy/node.sh"


def test_a_gateways_pool_has_the_routers_of_all_releases() -> None:
    pool, route = yaml.safe_load_all((ROOT / "deploy" / "gateway.yaml").read_text())
    jsonschema.Draft202012Validator(INFERENCE_POOL).validate(pool)
    (head, _), *others = groups(rendered("everything"))
    wanted = pool["spec"]["selector"]["matchLabels"].items()
    assert wanted <= head["template"]["metadata"]["labels"].items()
    assert not any(
        wanted <= group["template"].get("metadata", {}).get("labels", {}).items() for group, _ in others
    )
    (container,) = head["template"]["spec"]["containers"]
    (port,) = (each["containerPort"] for each in container["ports"] if each["name"] == "http")
    assert [each["number"] for each in pool["spec"]["targetPorts"]] == [port]
    ((backend,),) = (rule["backendRefs"] for rule in route["spec"]["rules"])
    group, _, _ = pool["apiVersion"].partition("/")
    assert backend == {"group": group, "kind": pool["kind"], "name": pool["metadata"]["name"]}


def test_rays_autoscaler_reads_the_nodes_of_each_role() -> None:
    derive = pytest.importorskip("ray.autoscaler._private.kuberay.autoscaling_config")
    objects = rendered("growing")
    (cluster,) = of_kind(objects, "RayCluster")
    assert cluster["spec"]["enableInTreeAutoscaling"]
    (_, head), *_ = groups(objects)
    assert environment(head)["RAY_HEAD_OPTIONS"] == "--no-monitor"
    cluster["metadata"]["namespace"] = "serving"
    kinds = derive._derive_autoscaling_config_from_ray_cr(cluster)["available_node_types"]
    bounds = {name: (kind["min_workers"], kind["max_workers"]) for name, kind in kinds.items()}
    assert bounds == {"headgroup": (0, 0), "prefill": (1, 4), "decode": (2, 8)}
    assert kinds["decode"]["resources"]["decode"] == 1 and kinds["headgroup"]["resources"]["CPU"] == 0
    assert not any("RAY_HEAD_OPTIONS" in environment(pod) for _, pod in groups(rendered("defaults")))


@pytest.mark.parametrize(("case", "policy"), [("defaults", None), ("growing", "Never")])
def test_pods_that_rays_autoscaler_may_remove_are_not_restarted(case: str, policy: str | None) -> None:
    _, *workers = groups(rendered(case))
    assert [pod.get("restartPolicy") for _, pod in workers] == [policy] * 2


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"workers": {"decode": {"replicas": 0}}}, "workers/decode/replicas"),
        ({"workers": {"decoder": {"replicas": 1}}}, "decoder"),
        ({"gpu": {"perWorker": 2}}, "gpu/perWorker"),
        ({"model": {"sizeGiB": 0}}, "model/sizeGiB"),
        ({"options": {"max_model_len": 1}}, "max_model_len"),
    ],
)
def test_wrong_values_are_refused_by_name(values: dict[str, Any], complaint: str) -> None:
    with pytest.raises(RenderError, match=complaint):
        render(values)
