"""The lessons' claims hold for the bundled models, and their commands run."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

import labs
from labs import decoding, paged_scheduler, quantization, speculation
from labs.decoding import DRAFT, TARGET, Cache, Llama, attend, attend_in_tiles, decode

PROMPT = [5 + 7 * index % 4000 for index in range(48)]


@pytest.fixture(scope="module")
def target() -> Llama:
    return Llama(TARGET)


@pytest.mark.parametrize("folder", [TARGET, DRAFT], ids=lambda folder: folder.name)
def test_the_model_equals_transformers(folder: Path) -> None:
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        expected = reference(torch.tensor([PROMPT])).logits[0]
    model = Llama(folder)
    torch.testing.assert_close(Cache(model, 64).compute(model, PROMPT), expected, atol=2e-4, rtol=1e-4)


def test_a_cache_changes_no_token(target: Llama) -> None:
    assert decode(target, PROMPT, 12, cached=True) == decode(target, PROMPT, 12, cached=False)


@pytest.mark.parametrize("tile", [1, 7, 64])
def test_attention_in_tiles_equals_attention(tile: int) -> None:
    q, k, v = torch.randn(5, 6, 16) * 5, torch.randn(40, 2, 16) * 5, torch.randn(40, 2, 16)
    torch.testing.assert_close(attend_in_tiles(q, k, v, tile), attend(q, k, v), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("policy", ["static", "continuous", "paged"])
def test_no_schedule_changes_a_token(target: Llama, policy: str) -> None:
    starts = (0, 4, 8, 12)
    requests = [paged_scheduler.Request(PROMPT[start : start + 30], end=38) for start in starts]
    expected = [decode(target, request.tokens, 8, cached=True) for request in requests]
    blocks = 9 if policy == "paged" else 32  # prompts take 8 blocks, whole texts 12, a reservation 32
    report = paged_scheduler.serve(target, requests, policy, num_blocks=blocks)
    assert [request.tokens[30:] for request in requests] == expected
    assert (report.preemptions > 0) == (policy == "paged")
    assert not any(request.blocks for request in requests)


class Still:
    """A model without weights: a schedule depends on no token."""

    layers = kv_heads = size = 1

    def __call__(self, tokens: torch.Tensor, *_: object) -> torch.Tensor:
        return torch.zeros(len(tokens), 1)


def test_a_schedule_fills_the_memory_as_its_page_says() -> None:
    requests = 48
    for line in page("paged_scheduler"):
        policy, *cells = line.split()
        if policy in ("static", "continuous", "paged"):
            waiting = paged_scheduler.make_requests(requests)
            model: Any = Still()
            report = paged_scheduler.serve(model, waiting, policy, num_blocks=128)
            shares = (f"{share:.0%}" for share in (report.mean_taken, report.mean_filled))
            counts = (str(report.steps), f"{report.mean_running:.1f}", *shares, str(report.preemptions))
            assert tuple(cells[1:6]) == counts, policy


def test_a_request_that_never_fits_is_an_error(target: Llama) -> None:
    with pytest.raises(RuntimeError, match="more than the 2 blocks"):
        paged_scheduler.serve(target, paged_scheduler.make_requests(1), "paged", num_blocks=2)


def test_drafts_change_no_token(target: Llama) -> None:
    plain = decode(target, PROMPT, 40, cached=True)
    for drafter in (speculation.DraftModel(Llama(DRAFT), 0.0), speculation.look_up):
        run = speculation.decode(target, PROMPT, 40, drafter, 4, temperature=0.0)
        assert run.tokens[:40] == plain
        assert 0 < run.accepted <= run.tried <= run.drafted


def test_verified_tokens_follow_the_targets_distribution() -> None:
    torch.manual_seed(1)
    p, q = torch.tensor([[0.6, 0.3, 0.1, 0.0]] * 2), torch.tensor([[0.1, 0.3, 0.2, 0.4]])
    counts = torch.zeros(4)
    for _ in range(8000):
        counts[speculation.verify([speculation.draw(q[0])], q, p)[0]] += 1
    torch.testing.assert_close(counts / 8000, p[0], atol=0.025, rtol=0)


def test_expected_tokens() -> None:
    assert speculation.expected_tokens(0.5, 2) == 1.75
    assert speculation.expected_speed(1.0, 3, 0.0) == 4
    assert speculation.expected_speed(0.0, 4, 0.25) == 0.5


@pytest.mark.parametrize("to", [*quantization.WEIGHTS, *quantization.KV], ids=lambda to: to.name)
def test_rounding_moves_no_number_by_more_than_half_a_step(to: quantization.Format) -> None:
    numbers = torch.randn(8, 128) + 0.5
    groups = numbers.unflatten(-1, (-1, to.group or 128))
    span = groups.amax(-1) - groups.amin(-1).clamp(max=0) if to.zero_point else 2 * groups.abs().amax(-1)
    moved = (quantization.round_to(numbers, to) - numbers).abs().unflatten(-1, (-1, to.group or 128)).amax(-1)
    if to.floating:
        step = span / 2 * 2.0**-3  # three bits of fraction, at the largest number
        limit = 0.501
    else:
        step = span / (2**to.bits - 1 - (not to.zero_point))
        limit = 1.0 if to.zero_point else 0.501
    assert (moved <= step * limit).all()


def test_a_draft_that_equals_the_model_loses_nothing() -> None:
    log_p = torch.randn(6, 9).log_softmax(-1)
    damage = quantization.compare(log_p, log_p, torch.arange(6), num_bytes=6)
    assert (damage.divergence, damage.same_token) == (0, 1)
    assert damage.overlap == pytest.approx(1)


def test_smaller_groups_lose_less_and_a_cache_less_than_weights() -> None:
    tokenizer = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    windows = quantization.read_windows(tokenizer, 1)
    text, exact = torch.tensor(windows[0][1:]), quantization.predict(Llama(TARGET), windows)

    def loss(log_q: torch.Tensor) -> float:
        return quantization.compare(exact, log_q, text, num_bytes=1).divergence

    by_row, floating, *groups, three_bits = (
        loss(quantization.predict(quantization.quantized(to), windows)) for to in quantization.WEIGHTS
    )
    assert by_row < floating < 0.01 < min(groups) and sorted(groups, reverse=True) == groups
    assert three_bits > max(groups)
    int8, _ = quantization.KV
    cache = quantization.attend_rounded(int8)
    assert loss(quantization.predict(Llama(TARGET), windows, cache)) < by_row


def test_awq_lowers_the_error_of_products() -> None:
    torch.manual_seed(0)
    weight, inputs = torch.randn(16, 128), torch.randn(64, 128) * torch.tensor([40.0] * 4 + [1.0] * 124)

    def error(rounded: torch.Tensor) -> float:
        return float((inputs @ (rounded - weight).T).square().sum())

    scaled = quantization.scaled_and_rounded(weight, inputs, quantization.AWQ)
    assert error(scaled) < error(quantization.round_to(weight, quantization.AWQ)) / 2


def test_products_with_fewer_bits_are_nearly_the_same() -> None:
    torch.manual_seed(0)
    exact, *others = (run().float() for run in quantization.products(rows=4, side=256).values())
    for other, limit in zip(others, (0.02, 0.15), strict=True):
        assert (other - exact).norm() / exact.norm() < limit


def page(lesson: str) -> list[str]:
    """Return the lines of output that a lesson's page shows."""
    text = Path(labs.__file__).with_name(f"{lesson}.md").read_text()
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [line for language, block in blocks if not language for line in block.splitlines() if line]


@pytest.mark.parametrize(
    ("main", "options", "says"),
    [
        (decoding.main, "--prompt-tokens 8 --lengths 4", "True"),
        (paged_scheduler.main, "--requests 1 --blocks 32", "paged"),
        (speculation.main, "--tokens 8 --drafts 2", "prompt lookup"),
        (quantization.main, "--texts 1 --side 64 --tries 1", "weights and KV int8"),
    ],
    ids=["decoding", "paged_scheduler", "speculation", "quantization"],
)
def test_each_lesson_runs(
    main: Callable[[], None],
    options: str,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["lesson", *options.split()])
    main()
    output = capsys.readouterr().out
    assert says in output
    shown = page(main.__module__.rpartition(".")[2])
    headings = [line for line in shown if not re.search(r"\d", line)]
    assert headings and set(headings) <= set(output.splitlines()), "its page shows other columns"
