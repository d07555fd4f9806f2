"""Drafted tokens: what is proposed, what verification says, and what became of them.

The host may not know them yet, nor those of the step before, where the device has chosen them (`LateTokens`).
What runs and verifies them reads them there. The host gets them with what it waits for anyway.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.batch.step_inputs import StepInputs
from engine.copies import Downloader
from protocol.outputs import TokenLogprobs


@dataclass(slots=True, eq=False)
class Draft:
    """Tokens that may follow a sequence's last token. The sequence's next step runs and verifies them.

    Node i is `token_ids[i]`, a child of the earlier node `parents[i]`, or of the sequence's last token (-1);
    siblings differ. Without `parents` the nodes form a chain. The tokens after the nodes are `probes`: the
    step computes the token after each, but never accepts a probe. A probe's entry is the mask of rows on its
    path: bit 0 is the sequence's last token, bit i + 1 is token i, and the highest set bit is the probe.

    `distributions`, float32 [nodes, vocab_size], are the probabilities that nodes were drawn with; None if
    the draft is deterministic. `is_blind`: whether it was drafted with truncated context; its acceptance says
    nothing of its request's origin. The first `num_predicted` tokens come from the client's prediction of the
    answer. While tokens are `late`, `ids` has placeholders for them, and `token_ids` waits for the tokens. If
    the tree's shape is late too, all nodes follow the last token until `settle`.
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
        if self.parents is None:
            return [*range(1, self.num_nodes + 1)]
        depths: list[int] = []
        for parent in self.parents:
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


class LateTokens:
    """Late tokens. In a step's rows and in drafts, `~i` is the placeholder of late token i."""

    def __init__(self, on_device: Tensor, download: Downloader) -> None:
        """Take the tokens `on_device`, int64 [n]. A negative one, whose row had no valid token, runs as 0."""
        self._on_device = on_device
        self._download = download
        self._values: list[int] | None = None

    def fill(self, inputs: StepInputs) -> None:
        """Write the tokens to the rows that hold their placeholders."""
        self.fill_ids(inputs.token_ids)

    def fill_ids(self, ids: Tensor) -> None:
        """Replace the placeholders in `ids` [n], in place on the device."""
        torch.clamp(taken(self._on_device, ids, ids), min=0, out=ids)

    def fill_nodes(self, nodes: Tensor) -> None:
        """Replace the placeholders in `nodes`, int64 [n, 2]: tokens and parents."""
        self.fill_ids(nodes[:, 0])

    def bring(self, wanted: Tensor, download: Downloader) -> list[int]:
        """Return the values of `wanted`, int64 [n], and download the late tokens in the same copy."""
        values: list[int] = download(torch.cat([wanted, self._on_device])).tolist()
        self._values = values[len(wanted) :]
        return values[: len(wanted)]

    @property
    def values(self) -> list[int]:
        """The late tokens on the host. Waits for the download if they have not been downloaded yet."""
        if self._values is None:
            self._values = self._download(self._on_device).tolist()
        return self._values

    def parents(self, ids: Sequence[int]) -> list[int] | None:
        """Return the parents of these nodes like `Draft.parents`, but -2 for a row that is no node. Return
        None if the host knows the parents already.
        """
        return None


def taken(values: Tensor, ids: Tensor, others: Tensor) -> Tensor:
    """Return `values[i]` where `ids` [n] has a placeholder `~i`, and `others` [n] elsewhere."""
    return torch.where(ids < 0, values.index_select(0, ids.bitwise_not().clamp_min_(0)), others)


class LateTrees(LateTokens):
    """Draft trees whose shape is late. To the host each tree is a star with the most nodes that it can have:
    all follow the sequence's last token. Nodes that the tree turns out to lack come last; they stay children
    of the root and are never accepted.
    """

    def __init__(self, nodes: Tensor, download: Downloader) -> None:
        """Take `nodes`, int64 [4, n]: tokens; the row of its tree that each node follows, -1 for no node;
        masks as in `AttentionMetadata.visible`; and each node's depth below the root's children.
        """
        super().__init__(nodes[:2].flatten(), download)
        _, self._rows_before, self._masks, self._deeper = nodes

    def fill(self, inputs: StepInputs) -> None:
        names, visible = inputs.token_ids, inputs.attention.visible
        assert visible is not None
        visible.copy_(taken(self._masks, names, visible))
        inputs.positions.add_(self.depth_offsets(names))
        super().fill(inputs)

    def fill_nodes(self, nodes: Tensor) -> None:
        names, parents = nodes.unbind(1)
        parents.copy_(taken(self._rows_before - 1, names, parents))
        super().fill_nodes(nodes)

    def depth_offsets(self, names: Tensor) -> Tensor:
        """Return int64 [n]: the depth below the root's children for each placeholder, 0 for other ids."""
        return taken(self._deeper, names, torch.zeros_like(names))

    def parents(self, names: Sequence[int]) -> list[int] | None:
        rows_before = self.values[len(self.values) // 2 :]
        return [rows_before[~name] - 1 for name in names]
