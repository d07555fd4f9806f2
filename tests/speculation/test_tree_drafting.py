"""A draft model's trees in an engine: how often they are right, and where the draft's KV lies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.engine import Engine
from engine.kv.layout import DRAFT, TARGET
from speculation import tree_drafting
from tests.speculation.small_engine import INTERPRETED, ask, drafting, prompt_of, small_config, write_noisy

SAMPLED: dict[str, Any] = {"temperature": 0.8, "seed": 5}


def make_engine(target: Path, draft: Path) -> Engine:
    options = {"tree": True, "num_speculative_tokens": 12, "max_speculative_tokens": 5}
    return drafting(small_config(target), method="draft_model", model=str(draft), **options)


def test_a_draft_that_equals_the_target_is_right_to_the_last_token(target: Path) -> None:
    """It ranks sampled tokens by the target's own noise. Only a path that looked unlikely is left out."""
    engine = make_engine(target, target)
    for index, sampling in enumerate(({}, SAMPLED)):
        engine.add(ask(str(index), prompt_of(49 - 7 * index, index), ignore_eos=True, **sampling))
    outputs = []
    while engine.has_work():
        outputs += engine.step().outputs
    drafted = [output for output in outputs if output.drafted_tokens > 5]
    assert len(drafted) > 4
    assert sum(output.accepted_tokens for output in drafted) > 3.5 * len(drafted)


@pytest.mark.parametrize("on_device", [False, pytest.param(True, marks=INTERPRETED)])
def test_the_drafts_kv_equals_that_of_committed_tokens(
    target: Path, tmp_path: Path, on_device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compares after each step with a draft model that reads the text from the start."""
    monkeypatch.setattr(tree_drafting, "stays_on_device", lambda *_: on_device)
    write_noisy(target, tmp_path, 0.08)
    engine, fresh = make_engine(target, tmp_path), Engine(small_config(tmp_path))
    request = ask("r", prompt_of(42), ignore_eos=True, **SAMPLED)
    engine.add(request)
    tokens = list(request.prompt_token_ids)
    num_compared = 0
    while True:
        tokens += [token for output in engine.step().outputs for token in output.token_ids]
        if not engine.has_work():
            break
        num_drafted = engine.draft_state(request.request_id).num_tokens
        if num_drafted == 0:
            continue  # the prompt is read with the first draft
        assert len(tokens) - 2 <= num_drafted < len(tokens)
        (blocks,) = engine.sequences[request.request_id].held.blocks
        ours = places(engine.pool.segment(DRAFT), blocks, num_drafted)
        torch.testing.assert_close(ours, read_anew(fresh, tokens[:num_drafted]), atol=1e-4, rtol=1e-4)
        num_compared += 1
    assert num_compared > 4


def places(segment: Tensor, blocks: list[int], count: int) -> Tensor:
    """Return KV as [places, num_layers, 2, num_kv_heads, head_dim]."""
    return segment[blocks].movedim(3, 1).flatten(0, 1)[:count]


def read_anew(engine: Engine, token_ids: list[int]) -> Tensor:
    engine.add(ask("fresh", token_ids, 2), prefill_only=True)
    engine.step()
    while len(blocks := engine.computed("fresh")[0].blocks) * 16 < len(token_ids):
        engine.step()
    values = places(engine.pool.segment(TARGET), blocks, len(token_ids)).clone()
    engine.abort("fresh")
    return values
