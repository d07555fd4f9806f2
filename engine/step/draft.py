"""Drafted tokens: what is proposed, what verification says, and what became of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import Tensor

from engine.step.late_tokens import LateTokens
from protocol.outputs import TokenLogprobs


@dataclass(slots=True, eq=False)
class Draft:
    """Tokens that may follow a sequence, run and verified in its next step.

    Node i is `token_ids[i]` after node `parents[i]`, an earlier one, or after the sequence's last token (-1);
    siblings differ. Without `parents` it is a chain. Tokens beyond the nodes are `probes`: they are run for
    what the model says after them, but never accepted; each has a mask of the rows on the path to it, where
    bit 0 is the sequence's last token, bit i + 1 is token i, and the last bit set is its own.

    `distributions` [nodes, vocab_size], float32, has the probabilities that each node was drawn with; None
    says that the draft is deterministic. `is_blind`: drafted with truncated context; its acceptance is
    left out of statistics that requests share. The first `num_predicted` tokens came from the client's
    prediction of the answer. While its tokens are `late`, `ids` has names of them; whoever
    asks for `token_ids` waits. If its shape is late too, all nodes follow the last token until it is settled.
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
        """Take what is late; the host waits for it if it has not come yet. Rows that turn out to be no nodes
        of a tree are left as probes.
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
        """Its tokens, by name if they are among these `late` ones."""
        return self.ids if self.late is late else self.token_ids

    @property
    def num_nodes(self) -> int:
        return len(self.ids) - len(self.probes)

    @property
    def depth(self) -> int:
        """Nodes of the longest path."""
        return self.num_nodes if self.parents is None else max(self.depths(), default=0)

    def depths(self) -> list[int]:
        """How many tokens behind the sequence's last one each node is."""
        depths: list[int] = []
        for node in range(self.num_nodes):
            parent = self.parent(node)
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return depths

    def parent(self, node: int) -> int:
        return node - 1 if self.parents is None else self.parents[node]

    def path(self, node: int) -> list[int]:
        """The tokens up to a node, its own the last; none for -1."""
        tokens: list[int] = []
        while node >= 0:
            tokens.append(self.token_ids[node])
            node = self.parent(node)
        return tokens[::-1]

    def paths(self) -> list[list[int]]:
        """The paths of all nodes."""
        found: list[list[int]] = []
        for node in range(self.num_nodes):
            parent = self.parent(node)
            found.append([*(found[parent] if parent >= 0 else ()), self.token_ids[node]])
        return found

    def first(self, num_nodes: int) -> Draft:
        """Its first nodes, which stay in their places, so that KV that was drafted with them does too."""
        parents, drawn = self.parents, self.distributions
        return Draft(
            self.token_ids[:num_nodes],
            parents[:num_nodes] if parents is not None and num_nodes else None,
            distributions=None if drawn is None else drawn[:num_nodes],
            is_blind=self.is_blind,
            num_predicted=self.num_predicted,
        )

    def masks(self) -> list[int] | None:
        """For the sequence's last token and each of `token_ids`: the rows that it sees. None for a chain."""
        if self.parents is None and not self.probes:
            return None
        masks = [1]
        for node in range(self.num_nodes):
            masks.append(masks[self.parent(node) + 1] | 1 << (node + 1))
        return masks + self.probes


def late_among(drafts: Iterable[Draft | None]) -> LateTokens | None:
    """The late tokens of the first draft that has some. Other late tokens are brought where they are read."""
    return next((draft.late for draft in drafts if draft is not None and draft.late is not None), None)


@dataclass(slots=True, eq=False)
class Verdict:
    """Result of verification: the accepted nodes in order, and the token that the model adds.

    `token_ids` are the accepted tokens, then the model's own; `logprobs` has an entry for each. `probed` is
    the likeliest token after each of the draft's probes. `failed`: no token has a finite score.
    """

    token_ids: list[int]
    accepted: list[int]
    logprobs: list[TokenLogprobs | None]
    probed: list[int] = field(default_factory=list)
    failed: bool = False


@dataclass(slots=True, eq=False)
class Outcome:
    """The result of a step for one sequence.

    `start`: the first place whose KV it computed; `num_tokens` from there on are committed, `num_accepted`
    of them drafted. `num_rows`: the sequence's rows in the step, drafted ones included.
    """

    start: int
    num_tokens: int
    num_rows: int
    num_accepted: int
    draft: Draft | None = None
    verdict: Verdict | None = None
