"""Engines with and without Medusa heads, on a tiny target in fp32, and what the heads should draft there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from engine.engine import Engine
from engine.step.draft import Draft
from engine.step.sequence import SequenceState
from protocol.config import ServeConfig, field_docs
from protocol.outputs import TokenOutput
from protocol.requests import EngineRequest
from protocol.sampling import SamplingParams
from protocol.speculation import Method, Quantization, SpeculativeConfig
from speculation.medusa.drafter import MedusaDrafter
from speculation.speculator import speculate


def make_engine(
    target: Path,
    heads: Path | None = None,
    num_blocks: int = 96,
    method: Method = "medusa",
    heads_in: Quantization | None = None,
    **options: Any,
) -> Engine:
    """With heads unless there are none. Options are the speculation's or the server's."""
    config = ServeConfig(
        model=str(target),
        dtype="float32",
        device="cpu",
        compile="off",
        max_model_len=256,
        max_num_batched_tokens=32,
        max_num_seqs=8,
        kv_cache_memory_bytes=num_blocks * 2 * 2 * 16 * 2 * 16 * 4,
    )
    of_server = {name: value for name, value in options.items() if name in field_docs()}
    config = replace(config, **of_server)
    if heads is None:
        return Engine(config)
    rest = {name: value for name, value in options.items() if name not in of_server}
    speculative = SpeculativeConfig(method=method, model=str(heads), quantization=heads_in, **rest)
    return Engine(replace(config, speculative_config=speculative), speculate=speculate)


def drafter_of(engine: Engine) -> MedusaDrafter:
    drafter = engine._speculator._drafters["medusa"]  # type: ignore[union-attr]
    assert isinstance(drafter, MedusaDrafter)
    return drafter


class Watch:
    """`drafts`: for every draft the request, the committed tokens, and the draft."""

    def __init__(self, engine: Engine) -> None:
        self.drafts: list[tuple[str, list[int], Draft]] = []
        drafter = drafter_of(engine)
        propose = drafter.propose

        def watched(sequences: Sequence[SequenceState], counts: Sequence[int]) -> list[Draft | None]:
            drafts = propose(sequences, counts)
            for sequence, draft in zip(sequences, drafts, strict=True):
                if draft is not None:
                    self.drafts.append((sequence.request_id, list(sequence.token_ids), draft))
            return drafts

        drafter.propose = watched  # type: ignore[method-assign]


def ask(request_id: str, prompt: list[int], max_tokens: int = 24, **sampling: Any) -> EngineRequest:
    params = SamplingParams(max_tokens=max_tokens, **({"temperature": 0.0, "ignore_eos": True} | sampling))
    return EngineRequest(request_id=request_id, prompt_token_ids=prompt, sampling=params)


def run(engine: Engine) -> dict[str, list[TokenOutput]]:
    outputs: dict[str, list[TokenOutput]] = {}
    while engine.has_work():
        for output in engine.step().outputs:
            assert output.finish_reason != "error", output.error
            outputs.setdefault(output.request_id, []).append(output)
    return outputs


def tokens(outputs: dict[str, list[TokenOutput]]) -> dict[str, list[int]]:
    return {
        name: [token for output in found for token in output.token_ids] for name, found in outputs.items()
    }


@torch.no_grad()
def final_hidden(model: PreTrainedModel, token_ids: list[int]) -> Tensor:
    """[1, hidden_size]: the state that the LM head reads after the last of these tokens."""
    output = model(input_ids=torch.tensor([token_ids]), output_hidden_states=True)
    return output.hidden_states[-1][:, -1]
