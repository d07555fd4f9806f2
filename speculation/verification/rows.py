"""The rows of drafted sequences, and the verdicts on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from engine.draft import Draft, Verdict
from engine.sampler import Sampler, SamplingRow
from engine.sequence import SequenceState
from protocol.outputs import TokenLogprobs


@dataclass(slots=True, eq=False)
class Decision:
    """The drafted nodes that are accepted, in order, the token after them, and one after each probe."""

    accepted: list[int]
    last_token: int
    probed: list[int] = field(default_factory=list)


class DraftedRows:
    """For each sequence the row after its last token and one after each drafted token, as in the logits.

    `sampling` tells the sampler of them, and `spans` are each sequence's.
    """

    def __init__(self, sequences: Sequence[SequenceState]) -> None:
        self.sequences = sequences
        self.spans: list[slice] = []
        self.sampling: list[SamplingRow] = []
        for sequence in sequences:
            first = len(self.sampling)
            self.sampling += sequence.step_rows()
            self.spans.append(slice(first, len(self.sampling)))

    def conclude(
        self, decisions: Sequence[Decision], logits: Tensor, failed_rows: Sequence[int], sampler: Sampler
    ) -> list[Verdict]:
        """The sequences' verdicts; `logits` are those of the rows."""
        failed = set(failed_rows)
        visited = [
            [span.start, *(span.start + 1 + node for node in decision.accepted)]
            for span, decision in zip(self.spans, decisions, strict=True)
        ]
        token_ids = [
            [*_tokens(sequence.draft, decision.accepted), decision.last_token]
            for sequence, decision in zip(self.sequences, decisions, strict=True)
        ]
        logprobs: dict[int, TokenLogprobs] = {}
        if any(sequence.params.logprobs is not None for sequence in self.sequences):
            chosen: dict[int, int] = {}
            for rows, tokens in zip(visited, token_ids, strict=True):
                chosen.update(zip(rows, tokens, strict=True))
            logprobs = sampler.logprobs(logits, self.sampling, chosen)
        return [
            Verdict(
                token_ids=tokens,
                accepted=decision.accepted,
                logprobs=[logprobs.get(row) for row in rows],
                probed=decision.probed,
                failed=not failed.isdisjoint(rows),
            )
            for decision, rows, tokens in zip(decisions, visited, token_ids, strict=True)
        ]


def num_rows(sequence: SequenceState) -> int:
    return 1 + (len(sequence.draft.ids) if sequence.draft is not None else 0)


def _tokens(draft: Draft | None, nodes: Sequence[int]) -> list[int]:
    return [draft.token_ids[node] for node in nodes] if draft is not None else []
