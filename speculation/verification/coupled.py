"""Coupled verification: the target's own tokens, and as many at once as the draft foresaw.

At each drafted place the target's token is chosen just as without speculation, with the noise of its own
position. So the output is the same tokens, whatever was drafted; a draft is accepted while it equals them.
(Yang et al. 2023, "Inference with Reference", for greedy decoding; with noise shared by position it is exact
for sampling too.)
"""

from __future__ import annotations

from collections.abc import Sequence as Many

from torch import Tensor

from engine.sampler import Sampler
from engine.sequence import Sequence
from engine.speculator import Draft, Verdict
from speculation.verification.rows import sampling_rows


def verify(sequences: Many[Sequence], logits: Tensor, sampler: Sampler) -> list[Verdict]:
    """`logits` [rows, vocab_size]: for each sequence the row after its last token, then one after each
    drafted token. Returns a verdict for each sequence.
    """
    output = sampler.sample(logits, sampling_rows(sequences))
    failed_rows = set(output.failed_rows)
    verdicts = []
    first = 0
    for sequence in sequences:
        draft = sequence.draft
        count = 1 + (len(draft.token_ids) if draft is not None else 0)
        tokens = output.token_ids[first : first + count]
        accepted = agreeing_path(draft, tokens) if draft is not None else []
        visited = [0, *(node + 1 for node in accepted)]
        verdict = Verdict(
            token_ids=[tokens[row] for row in visited],
            accepted=accepted,
            logprobs=[output.logprobs[first + row] for row in visited],
            failed=any(first + row in failed_rows for row in visited),
        )
        if draft is not None and draft.probes:
            verdict.probed = tokens[1 + draft.num_nodes :]
        verdicts.append(verdict)
        first += count
    return verdicts


def agreeing_path(draft: Draft, tokens: Many[int]) -> list[int]:
    """The nodes, from the first on, whose token is the target's: `tokens[i]` is its own after row i."""
    path: list[int] = []
    last = -1
    for node in range(draft.num_nodes):  # a node's children come after it
        if draft.parent(node) == last and draft.token_ids[node] == tokens[last + 1]:
            path.append(node)
            last = node
    return path
