"""Profiles and requests for the tests of the planner."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec

from planner.cluster import ClusterLayout, SimulatedCluster, SimulatedRequest
from planner.profile import LinkProfile, Profile
from planner.trace import TraceRequest
from protocol.costs import StepCosts
from router.placement import placement_policy

_numbers = itertools.count(10**6)

BLOCK = 100
"""Tokens in a block of the trace."""

COSTS = StepCosts(
    step_s=0.01, row_s=0.001, context_s=0.0, chunk_s=0.0, token_s=0.001, attention_s=0.0, chunk_tokens=400
)
"""A step takes 10 ms, 1 ms more for each row, and 1 ms more for each token of a prompt."""


def profile(kv_tokens: int = 100_000, **changes: Any) -> Profile:
    costs: dict[str, Any] = {
        name: changes.pop(name) for name in list(changes) if name in StepCosts.__struct_fields__
    }
    fields: dict[str, Any] = {
        "link": LinkProfile(latency_s=0.0, bytes_per_s=1e12),
        "block_size": 10,
    } | changes
    return Profile(
        name="toy", sources=[], costs=msgspec.structs.replace(COSTS, **costs), kv_tokens=kv_tokens, **fields
    )


def layout(prefill: int, decode: int, policy: str = "cost", **changes: Any) -> ClusterLayout:
    return ClusterLayout(
        prefill, decode, placement_policy(policy), **{"disaggregation": prefill > 0} | changes
    )


def request(arrival: float, num_tokens: int, output_tokens: int, prompt: int = 0) -> SimulatedRequest:
    """Return a request. Requests with the same `prompt` number share their blocks, except for 0."""
    first = prompt or next(_numbers)
    blocks = [first * 1000 + block for block in range(num_tokens // BLOCK)]
    return SimulatedRequest(TraceRequest(arrival, num_tokens, output_tokens, blocks), BLOCK)


def run(
    where: ClusterLayout, requests: list[SimulatedRequest], using: Profile | None = None
) -> SimulatedCluster:
    cluster = SimulatedCluster(where, using or profile())
    cluster.run(requests)
    return cluster
