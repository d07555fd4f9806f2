"""The sampler's rows of drafted sequences: one after the last token, and one after each drafted token."""

from __future__ import annotations

from collections.abc import Iterable

from engine.sampler.rows import SamplingRow
from engine.sequence import Sequence
from engine.speculator import Draft
from protocol.sampling import SamplingParams

_LIKELIEST = SamplingParams(max_tokens=1, temperature=0.0)


def sampling_rows(sequences: Iterable[Sequence]) -> list[SamplingRow]:
    """In the order of the logits. After a probe only the model's likeliest token is wanted."""
    rows: list[SamplingRow] = []
    for sequence in sequences:
        rows.append(sequence.sampling_row())
        draft = sequence.draft
        if draft is not None:
            rows += (sequence.sampling_row(path) for path in paths(draft))
            rows += (
                SamplingRow(_LIKELIEST, [], [], sequence.position, sequence.request_id) for _ in draft.probes
            )
    return rows


def paths(draft: Draft) -> list[list[int]]:
    """For each node the drafted tokens up to it."""
    found: list[list[int]] = []
    for node in range(draft.num_nodes):
        parent = draft.parent(node)
        found.append([*(found[parent] if parent >= 0 else ()), draft.token_ids[node]])
    return found
