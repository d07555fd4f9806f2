"""What the engine asks of whoever speculates: drafts before a step, verdicts after its forward.

The engine itself only makes room for drafts, runs them with the other rows and keeps what was accepted.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from protocol.handoff import DraftState
from protocol.messages import TokenLogprobs
from protocol.speculation import SpeculationState

if TYPE_CHECKING:
    from engine.block_manager import BlockManager
    from engine.kv_pool import KVPool, KVShape
    from engine.loader import LoadedModel
    from engine.rehearsal import Rehearsal
    from engine.sampler import Sampler
    from engine.scheduler import ScheduledStep
    from engine.sequence import Sequence


@dataclass(slots=True, eq=False)
class Draft:
    """Tokens that may follow a sequence, run and verified in its next step.

    Node i is `token_ids[i]` after node `parents[i]`, an earlier one, or after the sequence's last token (-1);
    siblings differ. Without `parents` it is a chain. Tokens beyond the nodes are `probes`: they are run for
    what the model says after them, but never accepted; each has a mask of the rows on the path to it, where
    bit 0 is the sequence's last token, bit i + 1 is token i, and the last bit set is its own.

    `distributions` [nodes, vocab_size], float32, has the probabilities that each node was drawn with; None
    says that no chance was involved. `is_blind`: made without much of what the method goes by, so that its
    acceptance tells nothing of others.
    """

    token_ids: list[int]
    parents: list[int] | None = None
    probes: list[int] = field(default_factory=list)
    distributions: Tensor | None = None
    is_blind: bool = False

    @property
    def num_nodes(self) -> int:
        return len(self.token_ids) - len(self.probes)

    @property
    def depth(self) -> int:
        """Nodes of the longest path."""
        if self.parents is None:
            return self.num_nodes
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return max(depths, default=0)

    def parent(self, node: int) -> int:
        return node - 1 if self.parents is None else self.parents[node]

    def masks(self) -> list[int] | None:
        """For the sequence's last token and each of `token_ids`: the rows that it sees. None for a chain."""
        if self.parents is None and not self.probes:
            return None
        masks = [1]
        for node in range(self.num_nodes):
            masks.append(masks[self.parent(node) + 1] | 1 << (node + 1))
        return masks + self.probes


@dataclass(slots=True, eq=False)
class Verdict:
    """What a sequence gets out of a step: the accepted nodes in order, and one token more than those.

    `token_ids` are theirs and then the model's own; `logprobs` has an entry for each of them. `probed` is the
    likeliest token after each of the draft's probes. `failed`: no token has a finite score.
    """

    token_ids: list[int]
    accepted: list[int]
    logprobs: list[TokenLogprobs | None]
    probed: list[int] = field(default_factory=list)
    failed: bool = False


@dataclass(slots=True, eq=False)
class Outcome:
    """What a step did for one sequence.

    `start`: its first place whose KV was computed; `num_tokens` from there on are committed, `num_accepted`
    of them drafted. `num_rows`: rows that it had in the step, drafted ones included.
    """

    start: int
    num_tokens: int
    num_rows: int
    num_accepted: int
    draft: Draft | None = None
    verdict: Verdict | None = None


class Speculator(Protocol):
    """One per engine, for the engine's thread alone; `counters` and `report` may be called from any.

    `segment` is what its KV of one token looks like, None if it has none: the pool then has a second segment.
    `hidden_layers` are the hidden states that it wants of every computed row, numbered as in Transformers'
    `hidden_states`: 0 the embeddings, i the output of layer i, the last one after the final norm.
    """

    segment: KVShape | None
    hidden_layers: tuple[int, ...]

    def attach(self, loaded: LoadedModel, pool: KVPool, blocks: BlockManager, sampler: Sampler) -> None:
        """The pool exists now. Called once, before anything else."""
        ...

    def warm_up(self, rehearsal: Rehearsal) -> None:
        """Compile and measure what is to be compiled and measured before the first request."""
        ...

    def begin(self, sequence: Sequence, num_drafted: int, state: DraftState) -> None:
        """The sequence has got its blocks: for the first time, after a preemption, or by a hand-off.

        Their leading `num_drafted` places hold draft KV. `state` came with the hand-off.
        """
        ...

    def state(self, request_id: str) -> DraftState:
        """What is to be handed over with the blocks of a finished prefill."""
        ...

    def plan(self, decoding: Rows[Sequence], num_to_come: int) -> None:
        """Say in each sequence's `draft_room` for how many tokens the coming step should have room.

        `num_to_come` sequences more will decode soon, once their prompts are computed. It must not depend on
        tokens that are not committed.
        """
        ...

    def propose(self, step: ScheduledStep) -> None:
        """Set the `draft` of the step's sequences that have `draft_room`, of at most so many tokens."""
        ...

    def verify(self, sequences: Rows[Sequence], logits: Tensor) -> list[Verdict]:
        """`logits` has the rows of each sequence in order: after its last token, then after each drafted
        one.
        """
        ...

    def wants_hidden(self, step: ScheduledStep) -> bool:
        """Whether hidden states of the step are of use, which is about to run."""
        ...

    def observe(self, step: ScheduledStep, hidden: Tensor | None) -> None:
        """The step is over, its tokens are committed, and `step.outcomes` says what became of each sequence.

        `hidden` [total rows, len(hidden_layers) * hidden_size]: the rows of each of the step's sequences in
        order, drafted ones included. None if there are none, or they were not wanted.
        """
        ...

    def forget(self, sequence: Sequence) -> None:
        """Its request is over. Unknown ones are ignored."""
        ...

    def counters(self) -> dict[str, float]:
        """Totals since the start, by the names of the worker's counters."""
        ...

    def report(self) -> SpeculationState:
        """What speculation does and costs at present."""
        ...
