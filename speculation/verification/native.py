"""Verification of chains in one compiled call, for logits on a CPU: by the rule `coupled` or `standard`.

The noise is the same as in `rejection.py`; under `standard` a row's probabilities may differ from torch's in
their last bits. Rows after the first rejection are not read. Edited logits, log-probabilities, trees and
probes are left to the other implementations.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from torch import Tensor

from engine.sampler import Sampler
from engine.sampler.native import RowsFunction, readable
from engine.sampler.rows import edits_logits
from engine.step.draft import Verdict
from engine.step.sequence import SequenceState
from native.build import optional
from native.structs import fields
from protocol.speculation import Verification
from speculation.verification.rows import distributions_of

logger = logging.getLogger("tandem.speculation")
_SOURCE = Path(__file__).parent / "chains.cpp"


class Chains(ctypes.Structure):
    _fields_ = fields(_SOURCE, "Chains")


@optional(logger, "drafts are verified by torch's operators")
def compiled() -> RowsFunction:
    return RowsFunction(_SOURCE, "tandem_verify")


def can_verify(sequence: SequenceState) -> bool:
    draft, params = sequence.draft, sequence.params
    is_chain = draft is None or (draft.parents is None and not draft.probes)
    return is_chain and params.logprobs is None and not edits_logits(params)


def verify(
    sequences: Sequence[SequenceState], logits: Tensor, sampler: Sampler, rule: Verification
) -> list[Verdict]:
    """Verify like `verify_coupled`, for sequences that `can_verify`."""
    function, is_coupled = compiled(), rule == "coupled"
    assert function is not None
    count = len(sequences)
    requests = sampler.params_of([sequence.params for sequence in sequences])
    drafts = [sequence.draft for sequence in sequences]
    token_ids = [draft.token_ids if draft is not None else [] for draft in drafts]
    tokens = [token for tokens in token_ids for token in tokens]
    logits = readable(logits, count + len(tokens))
    vocab_size = logits.shape[1]
    drawn = [None if is_coupled else distributions_of(draft, logits) for draft in drafts]
    addresses = [0 if each is None else each.data_ptr() for each in drawn]
    positions = [sequence.position for sequence in sequences]
    inputs = np.array([*positions, *map(len, token_ids), *addresses, *tokens], np.int64)
    outcomes = np.empty((2, count), np.int64)
    masks = None
    if any(sequence.params.grammar is not None for sequence in sequences):
        masks = sampler.masks([row for sequence in sequences for row in sequence.step_rows()])
    inputs_at, outcomes_at, column = inputs.ctypes.data, outcomes.ctypes.data, inputs.itemsize * count
    chains = Chains(
        logits.data_ptr(),
        logits.stride(0),
        vocab_size,
        count,
        requests.table_address,
        inputs_at,
        inputs_at + column,
        inputs_at + 2 * column,
        inputs_at + 3 * column,
        outcomes_at,
        outcomes_at + column,
        None if masks is None else masks.addresses.ctypes.data,
        is_coupled,
    )
    function(chains, logits)
    accepted, last_tokens = outcomes.tolist()
    return [
        Verdict(
            token_ids=[*drafted[:num_accepted], max(last_token, 0)],
            accepted=list(range(num_accepted)),
            logprobs=[None] * (num_accepted + 1),
            failed=last_token < 0,
        )
        for drafted, num_accepted, last_token in zip(token_ids, accepted, last_tokens, strict=True)
    ]
