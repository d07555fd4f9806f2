"""A text as a vector: the state that the model has at its last token, of length one."""

from __future__ import annotations

import torch

from engine.step.launch import Launched
from engine.step.sequence import SequenceState


def embeddings(launched: Launched) -> dict[SequenceState, bytes]:
    """Return the embeddings of the prompts that this step ends, from the last layer's captured states."""
    packed, rows, end = launched.packed, {}, 0
    for sequence, each in zip(launched.step.sequences, packed.batch, strict=True):
        end += len(each.token_ids)
        if sequence.params.embeds:
            rows[sequence] = end - 1
    if not rows:
        return {}
    assert launched.hidden is not None
    states = launched.hidden[[*rows.values()]].float()
    vectors = torch.nn.functional.normalize(states, dim=-1).cpu().numpy().astype("<f4")
    return {sequence: vector.tobytes() for sequence, vector in zip(rows, vectors, strict=True)}
