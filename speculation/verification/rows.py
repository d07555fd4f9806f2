"""The rows of drafted sequences, and the verdicts on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from engine.copies import Downloader, Upload
from engine.sampler import Sampler, SamplingRow
from engine.step.draft import Draft, LateTrees, Verdict, late_among
from engine.step.sequence import SequenceState
from protocol.outputs import TokenLogprobs

OWN, STANDARD, BLOCK = RULES = range(3)
"""The rules of the kernels: nodes are accepted while they are the target's own tokens, or by chance."""


@dataclass(slots=True, eq=False)
class Decision:
    """The accepted draft nodes, in order, the token after them, and one token after each probe."""

    accepted: list[int]
    last_token: int
    probed: list[int] = field(default_factory=list)


class DraftedRows:
    """The row after each sequence's last token and one after each draft token, as in the logits.

    `sampling` describes the rows to the sampler, and `spans` are each sequence's. Drafts may be `late` if the
    verification `takes_late` ones; drafts that are not late together are settled.
    """

    def __init__(self, sequences: Sequence[SequenceState], *, takes_late: bool = False) -> None:
        self.sequences = sequences
        drafts = [sequence.draft for sequence in sequences]
        self.late = late_among(drafts) if takes_late else None
        for draft in drafts:
            if draft is not None and draft.late is not self.late:
                draft.settle()
        self.spans: list[slice] = []
        self.sampling: list[SamplingRow] = []
        for sequence in sequences:
            first = len(self.sampling)
            self.sampling += sequence.step_rows()
            self.spans.append(slice(first, len(self.sampling)))

    def position_offsets(self, upload: Upload) -> Tensor | None:
        """Return how much further than in `sampling` late trees' rows are: int64 [rows], on the device."""
        if not isinstance(self.late, LateTrees):
            return None
        names: list[int] = []
        for draft in (sequence.draft for sequence in self.sequences):
            names.append(0)
            if draft is not None:
                names += draft.ids if draft.late is not None else [0] * len(draft.ids)
        return self.late.depth_offsets(upload([np.array(names, np.int64)])[0])

    def bring(self, wanted: Tensor, download: Downloader) -> list[int]:
        """Return the values of `wanted`, int64 [n]. Also fetch late draft tokens, and settle the drafts."""
        if self.late is None:
            values: list[int] = download(wanted).tolist()
            return values
        values = self.late.bring(wanted, download)
        for sequence in self.sequences:
            if sequence.draft is not None:
                sequence.draft.settle()
        return values

    def conclude(
        self, decisions: Sequence[Decision], logits: Tensor, failed_rows: Sequence[int], sampler: Sampler
    ) -> list[Verdict]:
        """Return the sequences' verdicts; `logits` are the rows'."""
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


def distributions_of(draft: Draft | None, logits: Tensor) -> Tensor | None:
    """Return a draft's distributions as kernels read them, float32 [nodes, vocab_size] on their device."""
    if draft is None or draft.distributions is None:
        return None
    if draft.distributions.shape != (draft.num_nodes, logits.shape[1]):
        raise ValueError(f"a distribution for each of {draft.num_nodes} tokens: {draft.distributions.shape}")
    return draft.distributions.to(logits.device, torch.float32).contiguous()


def _tokens(draft: Draft | None, nodes: Sequence[int]) -> list[int]:
    return [draft.token_ids[node] for node in nodes] if draft is not None else []
