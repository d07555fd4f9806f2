"""Draft trees over a table of probabilities have valid shapes and contain the likeliest paths.

Ranking tokens by the target's later choice agrees with the sampler that makes it.
"""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.copies import upload_to
from engine.sampler import Sampler
from engine.sampler.rows import SamplingRow
from engine.step.draft import Draft
from protocol.sampling import SamplingParams
from speculation.chains import DraftRows
from speculation.drawing import rank
from tests.speculation.host_trees import grow_trees

VOCAB_SIZE = 5


def log_probs_after(path: tuple[int, ...], seed: int) -> Tensor:
    """Return log-probabilities [vocab_size] after a path from the root."""
    generator = torch.Generator().manual_seed(random.Random(f"{seed} {path}").getrandbits(40))
    return (torch.randn(VOCAB_SIZE, generator=generator) * 1.5).log_softmax(0)


def score_of(path: tuple[int, ...], seed: int) -> float:
    return sum(float(log_probs_after(path[:i], seed)[token]) for i, token in enumerate(path))


def path_to(draft: Draft, node: int) -> tuple[int, ...]:
    return () if node < 0 else (*path_to(draft, draft.parent(node)), draft.token_ids[node])


def grow_all(
    seeds: list[int], max_nodes: list[int], depth: int, width: int
) -> tuple[list[Draft], list[list[DraftRows]]]:
    """Return the drafts, and the rows of all levels."""
    tokens = torch.arange(VOCAB_SIZE)
    drafts, levels = grow_trees(
        max_nodes, depth, width, lambda tree, path: (log_probs_after(path, seeds[tree]), tokens)
    )
    assert all(draft is not None for draft in drafts)
    return [draft for draft in drafts if draft is not None], levels


@pytest.mark.parametrize(("max_nodes", "depth", "width"), [(24, 5, 4), (63, 8, 5), (3, 8, 4), (10, 1, 4)])
def test_rows_agree_with_nodes(max_nodes: int, depth: int, width: int) -> None:
    (draft,), levels = grow_all([1], [max_nodes], depth, width)
    assert draft.parents is not None and draft.num_nodes <= max_nodes
    assert all(parent < node for node, parent in enumerate(draft.parents))
    children = list(zip(draft.parents, draft.token_ids, strict=True))
    assert len(set(children)) == len(children)
    assert max(len(path_to(draft, node)) for node in range(draft.num_nodes)) <= depth
    masks = draft.masks()
    assert masks is not None
    row = 1
    for number, (rows,) in enumerate(levels):
        assert len(rows.token_ids) <= width and rows.masks is not None
        for token, mask in zip(rows.token_ids, rows.masks, strict=True):
            assert (token, mask) == (draft.token_ids[row - 1], masks[row])
            assert number + 1 == len(path_to(draft, row - 1))
            row += 1
    assert row - 1 <= draft.num_nodes


@pytest.mark.parametrize("seed", range(8))
def test_the_likeliest_paths_are_in_the_tree(seed: int) -> None:
    """It has all nodes that were run and the likeliest known others, which is nearly the best tree."""
    depth, max_nodes = 4, 12
    (draft,), levels = grow_all([seed], [max_nodes], depth, width=VOCAB_SIZE)
    nodes = [path_to(draft, node) for node in range(draft.num_nodes)]
    num_run = sum(len(rows.token_ids) for (rows,) in levels)
    run, leaves = nodes[:num_run], nodes[num_run:]
    known = {(*path, token) for path in [(), *run] for token in range(VOCAB_SIZE)} - set(run)
    assert leaves == likeliest(known, seed, max_nodes - num_run)
    every: list[tuple[int, ...]] = [()]
    for path in every:
        if len(path) < depth:
            every += [(*path, token) for token in range(VOCAB_SIZE)]
    best = likeliest(set(every[1:]), seed, max_nodes)
    assert expected_length(nodes, seed) > 0.9 * expected_length(best, seed)


def likeliest(paths: set[tuple[int, ...]], seed: int, count: int) -> list[tuple[int, ...]]:
    return sorted(paths, key=lambda path: score_of(path, seed), reverse=True)[:count]


def expected_length(paths: list[tuple[int, ...]], seed: int) -> float:
    return sum(math.exp(score_of(path, seed)) for path in paths)


def test_a_batch_grows_each_tree_independently() -> None:
    together, _ = grow_all([1, 2, 3], [20, 5, 1], depth=5, width=3)
    for index, (seed, limit) in enumerate([(1, 20), (2, 5), (3, 1)]):
        (alone,), _ = grow_all([seed], [limit], depth=5, width=3)
        assert (alone.token_ids, alone.parents) == (together[index].token_ids, together[index].parents)


def test_impossible_tokens_are_not_drafted() -> None:
    def after(tree: int, path: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        scores = torch.full((VOCAB_SIZE,), math.nan if tree else -math.inf)
        if not (tree or path):
            scores[2] = 0.0
        return scores, torch.arange(10, 10 + VOCAB_SIZE)

    (draft, none), (level, *_) = grow_trees([8, 8], 3, 4, after)
    assert [rows.token_ids for rows in level] == [[12], []]
    assert draft is not None and (draft.token_ids, draft.parents) == ([12], [-1])
    assert none is None


RANKED_SIZE = 500
CPU = torch.device("cpu")


def logits_of(num_rows: int, sharpness: float = 3.0) -> torch.Tensor:
    return torch.randn(num_rows, RANKED_SIZE, generator=torch.Generator().manual_seed(0)) * sharpness


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.0},
        {"temperature": 0.0, "top_k": 1, "top_p": 0.1, "min_p": 0.9},
        {"temperature": 0.7},
        {"temperature": 1.0, "top_k": 3},
        {"temperature": 1.0, "top_p": 0.5},
        {"temperature": 1.0, "min_p": 0.2},
        {"temperature": 1e-9},
    ],
    ids=str,
)
def test_the_first_token_is_the_samplers_choice(sampling: dict[str, Any]) -> None:
    logits = logits_of(40)
    params = [SamplingParams(max_tokens=1, seed=seed, **sampling) for seed in range(40)]
    rows = [SamplingRow(p, [], [], 100 + i, str(i)) for i, p in enumerate(params)]
    taken = Sampler(RANKED_SIZE, CPU, []).sample(logits, rows).token_ids
    scores, token_ids = rank(logits, params, [row.position for row in rows], upload_to(CPU), with_noise=True)
    first = token_ids.gather(1, scores.argmax(1, keepdim=True))[:, 0].tolist()
    assert sum(a == b for a, b in zip(first, taken, strict=True)) >= 39  # one may come from far below
    torch.testing.assert_close(scores.exp().sum(1), torch.ones(40))


def test_without_noise_sampled_rows_have_their_own_probabilities() -> None:
    """Greedy rows are surer: the target takes the likeliest token without a draw."""
    logits = logits_of(2)
    params = [SamplingParams(max_tokens=1, temperature=t, seed=1) for t in (0.0, 2.0)]
    scores, token_ids = rank(logits, params, [5, 5], upload_to(CPU), with_noise=False)
    for row, p in enumerate(params):
        assert token_ids[row].tolist() == logits[row].topk(64).indices.tolist(), p
    expected = (logits[1] / 2.0)[token_ids[1]].log_softmax(0)
    torch.testing.assert_close(scores[1], expected)
    assert scores[0, 0] > logits[0].log_softmax(0).max()


def test_a_row_does_not_depend_on_others() -> None:
    logits = logits_of(3)
    params = [SamplingParams(max_tokens=1, temperature=t, seed=3, top_k=9) for t in (0.0, 0.7, 1.0)]
    together, _ = rank(logits, params, [7, 8, 9], upload_to(CPU), with_noise=True)
    for row in range(3):
        alone, _ = rank(
            logits[row : row + 1], params[row : row + 1], [7 + row], upload_to(CPU), with_noise=True
        )
        torch.testing.assert_close(together[row : row + 1], alone)
    assert together[0].isfinite().all() and together[1].isfinite().sum() == 9
