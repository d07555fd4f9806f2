"""A simulated request, in the form that the router's `Loads` count."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from planner.trace import TraceRequest
from protocol.roles import Task
from router.workers.kv_index import KEY_BITS
from router.workers.registry import Worker


@dataclass(eq=False, slots=True)
class SimulatedRequest:
    """`blocks` are the index's keys of its full blocks. Times are seconds of the simulation; it `ended` with
    its last token, or when it was refused. `workers` has the names of the workers it was placed on.
    """

    arrival: float
    num_tokens: int
    output_tokens: int
    blocks: Sequence[int] = ()
    is_refused: bool = False
    workers: Mapping[Task, str] = field(default_factory=dict)
    first_token: float = inf
    ended: float = inf
    assigned: dict[Task, Worker] = field(default_factory=dict)
    waits_at: Worker | None = None
    num_uncached: int = 0
    num_computed_by_decode: int = 0

    @property
    def holders(self) -> list[Worker]:
        return list(self.assigned.values())

    @property
    def num_prefill_tokens(self) -> int:
        return self.num_tokens

    @property
    def was_split(self) -> bool:
        return "prefill" in self.workers

    @property
    def ttft_s(self) -> float:
        return self.first_token - self.arrival

    @property
    def tpot_s(self) -> float:
        """Return the mean time of the tokens after the first one; 0 if there are none."""
        return (self.ended - self.first_token) / (self.output_tokens - 1) if self.output_tokens > 1 else 0.0


def simulated(request: TraceRequest, block_tokens: int) -> SimulatedRequest:
    """Return the request with block keys that, as in the router, name a block and all before it."""
    keys, parent = [], 0
    for hash_id in request.hash_ids[: request.input_len // block_tokens]:
        parent = hash((parent, hash_id)) & KEY_BITS
        keys.append(parent)
    return SimulatedRequest(request.arrival, request.input_len, request.output_len, keys)
