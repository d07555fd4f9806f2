"""Draft tokens of a sequence, the verdict on them, and the outcome of the step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import Tensor

from engine.step.late_tokens import LateTokens
from protocol.outputs import TokenLogprobs


@dataclass(slots=True, eq=False)
class Draft:
    """Tokens that may follow a sequence's last token. The sequence's next step runs and verifies them.

    Node i is `token_ids[i]`, a child of the earlier node `parents[i]`, or of the sequence's last token (-1);
    siblings differ. Without `parents` the nodes form a chain. The tokens after the nodes are `probes`: the
    step computes the token after each, but never accepts a probe. A probe's entry is the mask of rows on its
    path: bit 0 is the sequence's last token, bit i + 1 is token i, and the highest set bit is the probe.

    `distributions`, float32 [nodes, vocab_size], are the probabilities that nodes were drawn with; None if
    the draft is deterministic. `is_blind`: whether it was drafted with truncated context; its acceptance is
    left out of statistics that requests share. The first `num_predicted` tokens come from the client's
    prediction of the answer. While tokens are `late`, `ids` has placeholders for them, and `token_ids` waits
    for the tokens. If the tree's shape is late too, all nodes follow the last token until `settle`.
    """

    ids: list[int]
    parents: list[int] | None = None
    probes: list[int] = field(default_factory=list)
    distributions: Tensor | None = None
    is_blind: bool = False
    num_predicted: int = 0
    late: LateTokens | None = None

    @property
    def token_ids(self) -> list[int]:
        self.settle()
        return self.ids

    def settle(self) -> None:
        """Replace the placeholders with the late tokens, waiting for them if needed. Rows that turn out not
        to be tree nodes become probes.
        """
        if self.late is None:
            return
        late, self.late = self.late, None
        parents = late.parents(self.ids)
        self.ids = [late.values[~each] for each in self.ids]
        if parents is not None:
            self.parents = [parent for parent in parents if parent >= -1]
            self.probes = [1 | 2 << node for node in range(len(self.parents), len(parents))]

    def ids_beside(self, late: LateTokens | None) -> list[int]:
        """Return the draft's tokens, as placeholders if they are in `late`."""
        return self.ids if self.late is late else self.token_ids

    @property
    def num_nodes(self) -> int:
        return len(self.ids) - len(self.probes)

    @property
    def depth(self) -> int:
        """Number of nodes on the longest path."""
        return self.num_nodes if self.parents is None else max(self.depths(), default=0)

    def depths(self) -> list[int]:
        """Return the distance of each node from the sequence's last token, in tokens."""
        depths: list[int] = []
        for node in range(self.num_nodes):
            parent = self.parent(node)
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return depths

    def parent(self, node: int) -> int:
        return node - 1 if self.parents is None else self.parents[node]

    def path(self, node: int) -> list[int]:
        """Return the tokens on the path to a node, ending with the node's own; [] for -1."""
        tokens: list[int] = []
        while node >= 0:
            tokens.append(self.token_ids[node])
            node = self.parent(node)
        return tokens[::-1]

    def paths(self) -> list[list[int]]:
        """Return the path to each node."""
        found: list[list[int]] = []
        for node in range(self.num_nodes):
            parent = self.parent(node)
            found.append([*(found[parent] if parent >= 0 else ()), self.token_ids[node]])
        return found

    def first(self, num_nodes: int) -> Draft:
        """Return a draft of the first `num_nodes` nodes, which keep their places and so their draft KV."""
        parents, drawn = self.parents, self.distributions
        return Draft(
            self.token_ids[:num_nodes],
            parents[:num_nodes] if parents is not None and num_nodes else None,
            distributions=None if drawn is None else drawn[:num_nodes],
            is_blind=self.is_blind,
            num_predicted=self.num_predicted,
        )

    def masks(self) -> list[int] | None:
        """Return masks of the rows that the sequence's last token and each token see; None for a chain."""
        if self.parents is None and not self.probes:
            return None
        masks = [1]
        for node in range(self.num_nodes):
            masks.append(masks[self.parent(node) + 1] | 1 << (node + 1))
        return masks + self.probes


def late_among(drafts: Iterable[Draft | None]) -> LateTokens | None:
    """Return the late tokens of the first draft that has any. Others are downloaded when they are read."""
    return next((draft.late for draft in drafts if draft is not None and draft.late is not None), None)


@dataclass(slots=True, eq=False)
class Verdict:
    """Result of verification: the accepted nodes in order, and the token that the model adds.

    `token_ids` are the accepted tokens, then the model's own; `logprobs` has an entry for each. `probed` has
    the likeliest token after each of the draft's probes. `failed`: whether no token has a finite score.
    """

    token_ids: list[int]
    accepted: list[int]
    logprobs: list[TokenLogprobs | None]
    probed: list[int] = field(default_factory=list)
    failed: bool = False


@dataclass(slots=True, eq=False)
class Outcome:
    """Result of a step for one sequence.

    The step computed KV from place `start` on and committed `num_tokens` tokens from there; `num_accepted`
    of them are draft tokens. `num_rows`: the sequence's rows in the step, including its draft's.
    """

    start: int
    num_tokens: int
    num_rows: int
    num_accepted: int
    draft: Draft | None = None
    verdict: Verdict | None = None
