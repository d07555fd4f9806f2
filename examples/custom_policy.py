"""A placement policy of your own: each API client's session stays where its name falls, whatever the load.

    PYTHONPATH=. tandem serve --placement examples.custom_policy:by_session

A rule is a pure function of the request's facts, the workers that take requests, the task (`prefill` or
`decode`) and a counter. It returns a worker, or None where there is none for the task.
"""

from __future__ import annotations

from zlib import crc32

from protocol.roles import Task
from router.placement.cluster import Cluster
from router.placement.interface import PolicyState, RequestFacts, WorkerSnapshot


def by_session(
    request: RequestFacts, cluster: Cluster, task: Task, state: PolicyState
) -> WorkerSnapshot | None:
    place = crc32(request.session.encode()) if request.session else state.turn
    return cluster.at(task, place, request.avoid)
