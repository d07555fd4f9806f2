"""A placement policy of your own: long prompts have a worker to themselves, and short ones never wait.

    PYTHONPATH=. tandem serve --decode-replicas 2 --placement examples.custom_policy:long_apart

A rule is a pure function of the request's facts, the workers that take requests, the task (`prefill` or
`decode`) and a counter. It returns a worker, or None where there is none for the task. It is not asked about
requests of a session (`x-session-id`), which stay where the session is.
"""

from __future__ import annotations

from protocol.roles import Task
from router.placement.cluster import Cluster
from router.placement.interface import PolicyState, RequestFacts, WorkerSnapshot

LONG = 128
"""Tokens that are to be computed before the first one of the answer."""


def long_apart(
    request: RequestFacts, cluster: Cluster, task: Task, state: PolicyState
) -> WorkerSnapshot | None:
    last = cluster.count(task) - 1
    place = last if request.num_tokens >= LONG or last < 1 else state.turn % last
    return cluster.at(task, place, request.avoid)
