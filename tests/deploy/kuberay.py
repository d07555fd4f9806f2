"""A JSON Schema of KubeRay's `RayCluster` (ray.io/v1) with the fields that our manifest may use.

It follows `ray-operator/apis/ray/v1/raycluster_types.go`; pods are Kubernetes' own.
"""

from __future__ import annotations

from typing import Any


def _object(required: tuple[str, ...], **properties: Any) -> dict[str, Any]:
    """Return a schema of an object without further fields, which the API server would drop."""
    fields = {"properties": properties, "required": list(required)}
    return {"type": "object", "additionalProperties": False, **fields}


_STRINGS = {"type": "object", "additionalProperties": {"type": "string"}}
_NUMBER = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
_POD = {"type": "object", "required": ["spec"]}
_HEAD = _object(
    ("rayStartParams", "template"),
    rayStartParams=_STRINGS,
    template=_POD,
    serviceType={"enum": ["ClusterIP", "NodePort", "LoadBalancer"]},
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
RAY_CLUSTER = _object(
    ("apiVersion", "kind", "metadata", "spec"),
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayCluster"},
    metadata=_object(("name",), name={"type": "string"}, annotations=_STRINGS),
    spec=_object(
        ("headGroupSpec",),
        rayVersion={"type": "string"},
        headGroupSpec=_HEAD,
        workerGroupSpecs={"type": "array", "items": _GROUP},
    ),
)
