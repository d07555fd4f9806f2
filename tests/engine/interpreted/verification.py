"""Verification's kernels in Triton's interpreter give the same verdicts as torch's operators."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.copies import Downloader
from engine.sampler import Sampler, TorchSampler
from engine.sampler.rows import SamplingRow
from engine.sampler.triton_kernel import chooser, noise
from engine.sampler.triton_kernel.chooser import Chosen, TritonSampler
from engine.sampler.triton_kernel.noise import about_gumbel, gumbel
from engine.step.draft import Draft, LateTokens, LateTrees
from protocol.speculation import Verification
from speculation.verification import on_device
from speculation.verification.verify import verify
from tests.speculation.verdicts import BY_CHANCE, RULES, TREE, VOCAB, Batch, sequence_with, told

CPU = torch.device("cpu")


@pytest.fixture(autouse=True, scope="module")
def small_tiles() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chooser, "TILE", 64)
        patch.setattr(chooser, "_GROUP", 16)
        patch.setattr(chooser, "_WIDTH", 8)
        patch.setattr(on_device, "_TILE", 64)
        torch.set_num_threads(1)
        yield


class Weighed(Sampler):
    """Distributions by torch's operators; only the verification uses kernels."""

    @property
    def has_kernels(self) -> bool:
        return True

    def chosen(self, logits: Tensor, rows: Sequence[SamplingRow], further: Tensor | None = None) -> Chosen:
        assert further is None
        tokens, failed = self.choose(logits, rows)
        tokens[failed] = -1
        count = len(rows)
        temperatures = torch.tensor([float(not row.params.is_greedy) for row in rows], dtype=torch.float64)
        scales = torch.tensor([0.0, -torch.inf, 1.0], dtype=torch.float64).expand(count, 3).contiguous()
        arrivals = torch.zeros(count, dtype=torch.int32)
        return Chosen(tokens, self.probabilities(logits, rows).log(), temperatures, scales, arrivals)


def sampler_of(cls: type[Sampler], kernels: TritonSampler | None = None) -> Sampler:
    return cls(VOCAB, CPU, [0], row_sampler=kernels or TorchSampler())


@triton.jit
def _noise(bits, exact, about, COUNT: tl.constexpr):
    i = tl.arange(0, COUNT)
    these = tl.load(bits + i)
    tl.store(exact + i, gumbel(these))
    tl.store(about + i, about_gumbel(these))


def test_noise_in_float32_finds_those_that_may_win() -> None:
    """Over all of its range, at whose ends 1 - u and u are least."""
    ends = [
        sign * (2**31 - 1 - step) for sign in (1, -1) for step in (*range(50), *range(50, 1 << 28, 99_991))
    ]
    bits = torch.tensor([*ends, *range(-(2**31), 2**31, 1_000_003)][:8192], dtype=torch.int64).to(torch.int32)
    exact, about = torch.empty(2, len(bits))
    _noise[(1,)](bits, exact, about, COUNT=len(bits))
    assert (exact - about).abs().max() < 1e-5 < noise.ROUNDING.value


@pytest.mark.parametrize("rule", BY_CHANCE)
def test_verdicts(rule: Verification) -> None:
    batch = Batch.of_each_kind(0)
    expected = told(verify(rule, batch.sequences, batch.logits, sampler_of(Sampler)))
    assert told(verify(rule, batch.sequences, batch.logits, sampler_of(Weighed))) == expected


@pytest.mark.parametrize("rule", BY_CHANCE)
def test_many_verdicts(rule: Verification) -> None:
    lengths = set()
    for seed in range(3):
        batch = Batch.of_many(seed)
        expected = told(verify(rule, batch.sequences, batch.logits, sampler_of(Sampler)))
        assert told(verify(rule, batch.sequences, batch.logits, sampler_of(Weighed))) == expected
        lengths |= {len(each[1]) for each in expected}
    assert len(lengths) > 3


@pytest.mark.parametrize("rule", BY_CHANCE)
def test_rows_that_fail(rule: Verification) -> None:
    batch = Batch.of_each_kind(2)
    logits, starts = batch.logits, [0]
    for sequence in batch.sequences:
        starts.append(starts[-1] + 1 + (len(sequence.draft.token_ids) if sequence.draft else 0))
    for row in (starts[0] + 1, starts[1], starts[3]):
        logits[row] = torch.nan
    found = verify(rule, batch.sequences, logits, sampler_of(Weighed))
    expected = verify(rule, batch.sequences, logits, sampler_of(Sampler))
    assert [each.failed for each in found] == [each.failed for each in expected]
    assert [each.failed for each in found][:2] == [True, True] and not found[4].failed


def test_a_rejection_may_leave_no_probability() -> None:
    """Except for rounding, a rejected token was drawn with a greater probability than the target's."""
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(1))
    sequence = sequence_with(Draft([5], distributions=torch.full((1, VOCAB), 1e9)))
    for rule in BY_CHANCE:
        expected = verify(rule, [sequence], logits, sampler_of(Sampler))
        found = verify(rule, [sequence], logits, sampler_of(Weighed))
        assert told(found) == told(expected) and not found[0].accepted


def test_kernels_from_logits_to_verdicts() -> None:
    batch = Batch.of_each_kind(1)
    kernels = sampler_of(Sampler, TritonSampler(CPU))
    expected = verify("block", batch.sequences, batch.logits, sampler_of(Sampler))
    assert told(verify("block", batch.sequences, batch.logits, kernels)) == told(expected)


@pytest.mark.parametrize("rule", RULES)
def test_chains_known_only_to_the_device(rule: Verification) -> None:
    """The batch also has trees and a sequence without a draft. One copy brings verdicts and tokens."""
    batch = Batch.of_each_kind(3)
    expected = told(verify(rule, batch.sequences, batch.logits, sampler_of(Sampler)))
    kernels = sampler_of(Sampler, TritonSampler(CPU))
    chains = [each.draft for each in batch.sequences if each.draft and each.draft.parents is None]
    tokens = [token for draft in chains for token in draft.token_ids]
    late = LateTokens(torch.tensor(tokens), Downloads())
    names = iter(range(len(tokens)))
    for draft in chains:
        draft.ids, draft.late = [~next(names) for _ in draft.ids], late
    kernels.download = downloads = Downloads()
    assert told(verify(rule, batch.sequences, batch.logits, kernels)) == expected
    assert (downloads.count, late._download.count) == (1, 0)  # type: ignore[attr-defined]
    assert len(chains) == 4 and sum(len(each[1]) for each in expected) > 3
    assert [token for draft in chains for token in draft.token_ids] == tokens


@pytest.mark.parametrize("rule", RULES)
def test_trees_known_only_to_the_device(rule: Verification) -> None:
    """They lie in the places of a larger tree. Places beyond their nodes are never accepted."""
    sampled: list[dict[str, Any]] = [{"temperature": 0.0}, *[{"temperature": 1.5}] * 8, {}, {"top_k": 50}]
    found, expected = Batch(4), Batch(4)
    for batch in (found, expected):
        for options in sampled:
            batch.add(options, len(TREE), parents=TREE, probes=[0b100000001, 0b1000000001])
            batch.add(options, 2)
    trees = [each.draft for each in found.sequences if each.draft and each.draft.parents]
    tokens, size = [tree.token_ids for tree in trees], len(TREE) + 2
    for of_tree, logits in zip(tokens, found.rows[::2], strict=True):
        of_tree[-1] = int(logits[0].argmax())
    places = [[*tokens[i], *(parent + 1 for parent in TREE), -1, -1] for i in range(len(trees))]
    nodes = torch.tensor(places).unflatten(1, (2, size)).movedim(1, 0).flatten(1)
    deeper = torch.tensor([*(depth - 1 for depth in Draft(TREE, TREE).depths()), 0, 0] * len(trees))
    late = LateTrees(torch.stack([*nodes, torch.zeros_like(deeper), deeper]), Downloads())
    for number, tree in enumerate(trees):
        tree.ids, tree.parents = [~(number * size + node) for node in range(size)], [-1] * size
        tree.probes, tree.late = [], late
    kernels = sampler_of(Sampler, TritonSampler(CPU))
    kernels.download = downloads = Downloads()
    verdicts = verify(rule, found.sequences, found.logits, kernels)
    theirs = verify(rule, expected.sequences, expected.logits, sampler_of(Sampler))
    assert [each.token_ids for each in verdicts] == [each.token_ids for each in theirs]
    assert [each.accepted for each in verdicts] == [each.accepted for each in theirs]
    assert max(len(each.accepted) for each in verdicts[2::2]) > 1, "by noise of places behind the next one"
    assert (downloads.count, late._download.count) == (1, 0)  # type: ignore[attr-defined]
    for tree, of_tree in zip(trees, tokens, strict=True):
        assert (tree.token_ids, tree.parents, len(tree.probes)) == (of_tree, TREE, 2)


class Downloads(Downloader):
    def __init__(self) -> None:
        super().__init__(CPU)
        self.count = 0

    def __call__(self, values: Tensor) -> Tensor:
        self.count += 1
        return super().__call__(values)


def test_cases_left_to_torch() -> None:
    (sequence,) = Batch.of_each_kind(0).sequences[1:2]
    assert on_device.can_verify(sequence) and sequence.draft is not None
    sequence.draft.parents = [-1, -1, 0, 0]
    assert not on_device.can_verify(sequence)
    sequence.draft = Draft([1] * 64)
    assert not on_device.can_verify(sequence)
