"""JSON Schemas of custom resources, with the fields that our chart and deploy/gateway.yaml may use.

`RAY_CLUSTER` follows `ray-operator/apis/ray/v1/raycluster_types.go` of KubeRay; pods are Kubernetes' own.
"""

from __future__ import annotations

from typing import Any


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
