"""Penalties and filters compared with Transformers' own processors, and each request's token counts."""

import random

import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from engine.sampler.batch import Batch
from engine.sampler.edits import Penalties, TokenCounts, apply_edits, edit_lists
from engine.sampler.rows import RequestParams
from engine.sampler.torch_sampler import apply_filters
from tests.engine.sampler_reference import make_row

VOCAB_SIZE = 500


def penalized(penalties: Penalties, logits: torch.Tensor, rows) -> torch.Tensor:
    requests, values = RequestParams([row.params for row in rows], VOCAB_SIZE), logits.clone()
    apply_edits(values, edit_lists(rows, requests, range(len(rows)), penalties, [], None))
    return values


@pytest.mark.parametrize("penalty", [0.5, 1.1, 2.0])
def test_repetition_penalty_equals_transformers(penalty):
    torch.manual_seed(0)
    logits = 3 * torch.randn(2, VOCAB_SIZE)
    rows = [
        make_row("a", [1, 2, 3], [4, 4], repetition_penalty=penalty),
        make_row("b", [9, 9], [1, 7], repetition_penalty=penalty),
    ]
    for index, row in enumerate(rows):
        history = torch.tensor([row.prompt_token_ids + row.output_token_ids])
        expected = RepetitionPenaltyLogitsProcessor(penalty)(history, logits[index : index + 1].clone())
        assert torch.equal(penalized(Penalties(), logits, rows)[index], expected[0])


@pytest.mark.parametrize(
    ("params", "warpers"),
    [
        ({"top_k": 7}, [TopKLogitsWarper(7)]),
        ({"top_p": 0.8}, [TopPLogitsWarper(0.8)]),
        ({"min_p": 0.05}, [MinPLogitsWarper(0.05)]),
        ({"temperature": 0.5, "top_p": 0.9}, [TemperatureLogitsWarper(0.5), TopPLogitsWarper(0.9)]),
        (
            {"min_p": 0.01, "top_k": 30, "top_p": 0.7},
            [MinPLogitsWarper(0.01), TopKLogitsWarper(30), TopPLogitsWarper(0.7)],
        ),
    ],
)
def test_filters_keep_the_same_tokens_as_transformers(params, warpers):
    torch.manual_seed(1)
    logits = 3 * torch.randn(16, VOCAB_SIZE)
    expected = logits.clone()
    for warper in warpers:
        expected = warper(None, expected)
    rows = [make_row(**params)] * 16
    requests = RequestParams([row.params for row in rows], VOCAB_SIZE)
    values = (logits - logits.amax(dim=1, keepdim=True)) / params.get("temperature", 1.0)
    apply_filters(values, Batch(logits, rows, requests, [*range(16)], None, None))
    assert torch.equal(values.isfinite(), expected.isfinite())


def test_counts_follow_the_output_through_growth_jumps_and_rewinds():
    generator = random.Random(0)
    prompt = [generator.randrange(30) for _ in range(20)]
    counts, output = TokenCounts(prompt), []
    for _ in range(300):
        if output and generator.random() < 0.4:
            del output[generator.randrange(len(output)) :]
        output.extend(generator.randrange(400) for _ in range(generator.randrange(6)))
        counts.follow(output)
        token_ids, numbers = counts.entries()
        expected = dict.fromkeys(prompt, 0) | {token: output.count(token) for token in output}
        assert dict(zip(token_ids.tolist(), numbers.tolist(), strict=True)) == expected


def test_forgotten_requests_leave_nothing():
    penalties = Penalties()
    logits = torch.zeros(1, VOCAB_SIZE)
    penalized(penalties, logits, [make_row("a", [], [7], presence_penalty=1.0)])
    penalties.forget("a")
    penalties.forget("unknown")
    fresh = penalized(penalties, logits, [make_row("a", [], [8], presence_penalty=1.0)])
    assert fresh[0, 7] == 0 and fresh[0, 8] == -1
    assert len(penalties._counts) == 1
