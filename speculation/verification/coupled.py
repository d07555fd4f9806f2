"""Coupled verification: the target's own tokens, as many at once as the draft predicted.

At each drafted place the target's token is chosen as without speculation, with the noise of its own position.
So the output is the same whatever was drafted, and a draft is accepted while it equals the output. (Yang et
al. 2023, "Inference with Reference", for greedy decoding; with noise shared by position it is exact for
sampling, too.)
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from engine.sampler import Sampler
from engine.step.draft import Draft, Verdict
from engine.step.sequence import SequenceState
from protocol.speculation import Verification
from speculation.verification.rows import Decision, DraftedRows


def verify(
    sequences: Sequence[SequenceState], logits: Tensor, sampler: Sampler, rule: Verification = "coupled"
) -> list[Verdict]:
    """Return a verdict for each sequence. `logits` [rows, vocab_size] are for each sequence the row after its
    last token, then one after each draft token. `rule` may be another one if chance has no part.
    """
    rows = DraftedRows(sequences, takes_late=sampler.has_kernels)
    tokens, failed_rows = _own_tokens(rows, logits, sampler)
    decisions = [
        _decide(sequence.draft, tokens[span]) for sequence, span in zip(sequences, rows.spans, strict=True)
    ]
    return rows.conclude(decisions, logits, failed_rows, sampler)


def _own_tokens(rows: DraftedRows, logits: Tensor, sampler: Sampler) -> tuple[list[int], list[int]]:
    """Return the target's token after each row, and the rows that failed. Also fetch late draft tokens."""
    if rows.late is None:
        chosen, failed_rows = sampler.choose(logits, rows.sampling)
        return chosen.tolist(), failed_rows
    tokens = sampler.tokens(logits, rows.sampling, rows.position_offsets(sampler.upload))
    token_ids = rows.bring(tokens, sampler.download)
    return [max(token, 0) for token in token_ids], [row for row, token in enumerate(token_ids) if token < 0]


def _decide(draft: Draft | None, tokens: list[int]) -> Decision:
    """Decide on a draft by the target's own token after each row."""
    if draft is None:
        return Decision([], tokens[0])
    accepted = agreeing_path(draft, tokens)
    last_row = accepted[-1] + 1 if accepted else 0
    return Decision(accepted, tokens[last_row], tokens[1 + draft.num_nodes :])


def agreeing_path(draft: Draft, tokens: Sequence[int]) -> list[int]:
    """Return the path of nodes whose tokens are the target's; `tokens[i]` is the target's after row i."""
    path: list[int] = []
    last = -1
    for node in range(draft.num_nodes):  # a node's children come after it
        if draft.parent(node) == last and draft.token_ids[node] == tokens[last + 1]:
            path.append(node)
            last = node
    return path
