"""A custom placement policy: long prompts get one worker to themselves, so short ones never wait for them.

    PYTHONPATH=. tandem serve --decode-replicas 2 --placement examples.custom_policy:long_apart

A rule is a pure function of the request's facts, the workers that take requests, the task (`prefill` or
`decode`) and a counter. It returns a worker, or None if no worker can do the task. Requests of a session
(`x-session-id`) stay on the session's worker without asking the rule.
"""

from __future__ import annotations

from protocol.roles import Task
from router.placement.cluster import Cluster
from router.placement.interface import PolicyState, RequestFacts, WorkerSnapshot

LONG = 128
"""Number of tokens to compute from which on a request counts as long."""


def long_apart(
    request: RequestFacts, cluster: Cluster, task: Task, state: PolicyState
) -> WorkerSnapshot | None:
    last = cluster.count(task) - 1
    place = last if request.num_tokens >= LONG or last < 1 else state.turn % last
    return cluster.at(task, place, request.avoid)
