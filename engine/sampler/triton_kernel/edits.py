"""The edits of a batch's logits as lists, which go to the device with the rest that a step uploads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from engine.sampler.batch import RequestParams
from engine.sampler.edits import forbidden_tokens
from engine.sampler.masks import TokenMasks
from engine.sampler.penalties import Penalties
from engine.sampler.rows import SamplingRow


class EditLists(NamedTuple):
    """Arrays, or tensors of them on the device. A row's tokens are those allowed, if not all are, those with
    a bias, the forbidden and the penalized ones, one behind the other.
    """

    bounds: Any
    """int32 [rows, 5]: where the four lists begin, and where the last one ends."""
    tokens: Any
    """int32, of all rows."""
    amounts: Any
    """float32 for each token: its bias, or its count in the output."""
    factors: Any
    """float32 [rows, 3]: repetition, presence and frequency."""
    masked: Any
    """int32 [rows]: which of the `masks` is the row's; -1 for none."""
    masks: Any
    """int32 [masks, words]: the bits of the tokens that grammars allow."""


def edit_lists(
    rows: Sequence[SamplingRow],
    requests: RequestParams,
    index: Sequence[int],
    penalties: Penalties,
    eos_token_ids: Sequence[int],
    masks: TokenMasks | None,
) -> EditLists:
    tokens: list[np.ndarray] = []
    amounts: list[np.ndarray] = []
    for row, request in zip(rows, index, strict=True):
        forbidden = [*requests.banned[request].tolist(), *forbidden_tokens(row, eos_token_ids)]
        tokens += [
            np.array(row.params.allowed_token_ids or (), np.int64),
            requests.biased[request],
            np.array(forbidden, np.int64),
        ]
        amounts += [np.zeros(len(tokens[-3])), requests.biases[request], np.zeros(len(forbidden))]
        penalized = penalties.entries(row) if requests.penalized[request] else (np.zeros(0), np.zeros(0))
        tokens.append(penalized[0])
        amounts.append(penalized[1])
    ends = np.cumsum([0, *map(len, tokens)])
    return EditLists(
        np.stack([ends[:-1:4], ends[1::4], ends[2::4], ends[3::4], ends[4::4]], axis=1).astype(np.int32),
        np.concatenate(tokens).astype(np.int32),
        np.concatenate(amounts).astype(np.float32),
        requests.penalties[np.array(index)],
        np.full(len(rows), -1, np.int32) if masks is None else masks.numbers,
        np.zeros((1, 1), np.int32) if masks is None else masks.words,
    )
