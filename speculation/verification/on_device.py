"""Verification by kernels: the host waits once, for the accepted nodes and the tokens after them.

The rules and the noise are the same as in `rejection.py`; probabilities may differ in their last bits. Trees
that were drawn by chance, and chains of more nodes than an integer has bits, are left to torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from engine.sampler import Sampler
from engine.step.draft import Draft, Verdict
from engine.step.sequence import SequenceState
from engine.triton_support import ceil_div
from protocol.requests import EngineRequest
from protocol.sampling import SamplingParams
from protocol.speculation import Verification
from speculation.verification.rows import BLOCK, OWN, STANDARD, Decision, DraftedRows, distributions_of

if TYPE_CHECKING:
    from engine.sampler.triton_kernel.chooser import Chosen

_TILE = 2048
_MOST_NODES = 63
_OPTIONS = {"num_warps": 8, "maxnreg": 96, "enable_fp_fusion": False}
"""Options of the kernels. With fewer registers some devices spill. Fusion would change the rounding."""


def can_verify(sequence: SequenceState) -> bool:
    draft = sequence.draft
    if draft is None:
        return True
    is_drawn_tree = draft.parents is not None and draft.distributions is not None
    return draft.num_nodes <= _MOST_NODES and not is_drawn_tree


def warm_up(sampler: Sampler, dtype: torch.dtype, rule: Verification) -> None:
    logits = torch.zeros((2, sampler.vocab_size), dtype=dtype, device=sampler.device)
    biases: list[dict[int, float]] = [{}, {0: 1.0}]
    for bias in biases:  # edited logits are float32
        sampling = SamplingParams(max_tokens=1, logit_bias=bias)
        request = EngineRequest(request_id="", prompt_token_ids=[0], sampling=sampling)
        sequence = SequenceState(request, 0)
        sequence.draft = Draft([0])
        verify([sequence], logits, sampler, rule)


def verify(
    sequences: Sequence[SequenceState], logits: Tensor, sampler: Sampler, rule: Verification
) -> list[Verdict]:
    """Verify like `verify_coupled`, for sequences that `can_verify`."""
    rows, as_blocks = DraftedRows(sequences, takes_late=True), rule == "block"
    chosen = sampler.chosen(logits, rows.sampling, rows.position_offsets(sampler.upload))
    drawn = [distributions_of(sequence.draft, chosen.logits) for sequence in sequences]
    asked = _spans(rows, drawn, as_blocks)
    spans, nodes = sampler.upload([asked, _nodes(sequences)])
    if rows.late is not None:
        rows.late.fill_nodes(nodes)
    stops = stops_of(spans, nodes, chosen, 1 + int(asked[:, 2].max()) if as_blocks else 0)
    has_probes = any(sequence.draft is not None and sequence.draft.probes for sequence in sequences)
    wanted = torch.cat([stops.flatten(), chosen.tokens]) if has_probes else stops.flatten()
    downloaded = rows.bring(wanted, sampler.download)
    count = len(sequences)
    decisions, failed_rows = [], []
    for number, (sequence, span) in enumerate(zip(sequences, rows.spans, strict=True)):
        bits, last_token = downloaded[number], downloaded[count + number]
        num_nodes = sequence.draft.num_nodes if sequence.draft is not None else 0
        accepted = [node for node in range(num_nodes) if bits >> node & 1]
        if last_token < 0:
            failed_rows.append(span.start + 1 + (accepted[-1] if accepted else -1))
        probed = downloaded[2 * count :][span][1 + num_nodes :] if has_probes else []
        decisions.append(Decision(accepted, max(last_token, 0), probed))
    return rows.conclude(decisions, logits, failed_rows, sampler)


def stops_of(spans: Tensor, nodes: Tensor, chosen: Chosen, lengths: int) -> Tensor:
    """Return `out` of `kernels.recover`, int64 [2, sequences]. Chains that are judged as blocks can stop at
    up to `lengths` lengths; 0: no chain is.
    """
    from speculation.verification.kernels import recover

    count, (num_rows, size), device = len(spans), chosen.logits.shape, chosen.logits.device
    tiles = ceil_div(size, _TILE)
    stops = torch.empty((2, count), dtype=torch.int64, device=device)
    recover[(tiles, count, max(1, lengths))](
        spans,
        nodes,
        *chosen,
        torch.empty((num_rows, tiles), device=device) if lengths else None,
        torch.empty((num_rows, 2, tiles), device=device),
        torch.empty((num_rows, 2, tiles), dtype=torch.int64, device=device),
        stops,
        chosen.logits.stride(0),
        count,
        SIZE=size,
        TILES=tiles,
        TILE=_TILE,
        PADDED=1 << (tiles - 1).bit_length(),
        **_OPTIONS,
    )
    return stops


def _spans(rows: DraftedRows, drawn: Sequence[Tensor | None], as_blocks: bool) -> np.ndarray:
    """Return the rows that `kernels._read_span` reads."""
    spans, first_node = [], 0
    for sequence, span, distributions in zip(rows.sequences, rows.spans, drawn, strict=True):
        draft, params = sequence.draft, sequence.params
        num_nodes = draft.num_nodes if draft is not None else 0
        rule = OWN
        if draft is not None and num_nodes and not params.is_greedy:
            rule = BLOCK if as_blocks and draft.parents is None else STANDARD
        at = 0 if distributions is None else distributions.data_ptr()
        spans.append([span.start, first_node, num_nodes, params.seed, sequence.position, rule, at])
        first_node += num_nodes
    return np.array(spans, np.int64)


def _nodes(sequences: Sequence[SequenceState]) -> np.ndarray:
    """Return each node's token, or the name of a late one, and its parent: int64 [nodes, 2]."""
    nodes = [
        [token_id, draft.parent(node)]
        for draft in (sequence.draft for sequence in sequences)
        if draft is not None
        for node, token_id in enumerate(draft.ids[: draft.num_nodes])
    ]
    return np.array(nodes, np.int64).reshape(-1, 2)
