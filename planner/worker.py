"""A simulated worker, and the hand-off of a prompt from one to another."""

from __future__ import annotations

from collections import deque

from planner.engine import SimulatedEngine, SimulatedSequence
from planner.kv_room import Holding
from protocol.costs import StepCosts
from router.placement.interface import LinkSpeed
from router.workers.registry import Worker


class SimulatedWorker:
    """An engine, the wire on which its blocks leave, and the router's view of both.

    `reserving` are the hand-offs that wait for room here, in strict order. `slot` is its place in the prefix
    index.
    """

    def __init__(
        self, known: Worker, engine: SimulatedEngine, wire: LinkSpeed, costs: StepCosts, slot: int
    ) -> None:
        self.known, self.slot = known, slot
        self.engine = engine
        self.reserving: deque[SimulatedHandoff] = deque()
        self.costs, self._wire = costs, wire
        self._wire_free_at = 0.0

    def send(self, tokens: float, begin: float) -> float:
        """Queue the KV of `tokens` tokens, in all tables, on the wire. Return the time of their arrival."""
        begin = max(begin, self._wire_free_at)
        self._wire_free_at = begin + self._wire.seconds(tokens * self.costs.kv_bytes)
        return self._wire_free_at


class SimulatedHandoff:
    """A hand-off. Its receiver reserves room when its sender begins with the prompt; each chunk moves while
    the next one is computed.
    """

    def __init__(self, prompt: SimulatedSequence, sender: SimulatedWorker, receiver: SimulatedWorker) -> None:
        self.prompt = prompt
        self.sender, self.receiver = sender, receiver
        self.arrives_at = 0.0
        self._holding: Holding | None = None
        self._sent = 0

    @property
    def is_granted(self) -> bool:
        return self._holding is not None

    def reserve(self) -> bool:
        """Return whether the receiver has room for the prompt, and reserve it. Blocks cached there are not
        sent.
        """
        self.receiver.engine.interrupt()
        room, prompt = self.receiver.engine.room, self.prompt
        blocks = prompt.blocks[: room.covered(prompt.blocks)]
        if room.lacks(blocks, prompt.num_tokens) > room.available:
            return False
        self._holding = room.take(blocks, prompt.num_tokens)
        self._sent = len(blocks) * room.block_tokens
        return True

    def push(self, now: float) -> None:
        """Send the tokens computed since the last push."""
        computed, kept = self.prompt.computed, self.sender.costs.kept_tokens
        self.arrives_at = max(self.arrives_at, now)
        if computed > self._sent:
            unsent = kept(computed) - kept(self._sent)
            self._sent = computed
            self.arrives_at = self.sender.send(unsent, now)

    def withdraw(self) -> None:
        """Release the reservation, since the prompt's first token was its last."""
        if self._holding is not None:
            self.receiver.engine.room.free(self._holding)
        else:
            self.receiver.reserving.remove(self)

    def received(self, order: int) -> SimulatedSequence:
        """Return the sequence that the receiver decodes, once everything has arrived."""
        prompt = self.prompt
        assert self._holding is not None
        self.receiver.engine.room.publish(self._holding, prompt.blocks)
        return SimulatedSequence(
            prompt.request,
            order,
            prompt.num_tokens,
            prompt.left,
            computed=prompt.num_tokens,
            holding=self._holding,
            has_answered=True,
        )
