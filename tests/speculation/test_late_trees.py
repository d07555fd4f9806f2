"""Trees that grow where the model runs, and that the host learns with the verdicts: they are those that it
would have grown itself, and so are all tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.draft import Draft
from engine.late_tokens import LateTokens
from engine.late_trees import LateLevel, LateTrees
from engine.rows import BlockTable, SequenceRows
from engine.sampler import Sampler, SamplingRow
from engine.step_inputs import StepShape, step_inputs
from engine.upload import upload_to
from protocol.outputs import TokenOutput
from protocol.speculation import Verification
from speculation import draft_model
from speculation.eagle import drafter as eagle_drafter
from speculation.tree_growth import TreeGrowth
from tests.speculation.small_engine import run, tokens
from tests.speculation.test_late_tokens import (
    SEEDED,
    asked,
    engine_of,
    given_for,
    without_download,
)
from tests.speculation.test_token_equality import (  # noqa: F401
    SAMPLING,
    head,
    medusa,
    plain,
    requests,
)

TREES = pytest.mark.parametrize("method", ["draft_model tree", "eagle tree", "medusa tree"])
CPU = torch.device("cpu")


@pytest.fixture
def grown(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Trees grow as on a GPU; counts those that did."""
    counts: Counter[str] = Counter()
    end = TreeGrowth.end

    def counted(self: TreeGrowth, *args: Any) -> Tensor:
        counts["trees"] += len(self._rooms)
        return end(self, *args)

    monkeypatch.setattr(TreeGrowth, "end", counted)
    for module in (draft_model, eagle_drafter):
        monkeypatch.setattr(module, "can_grow_on_device", lambda *_: True)
    return counts


def told(found: dict[str, TokenOutput]) -> dict[str, tuple[int, int]]:
    return {name: (each.drafted_tokens, each.accepted_tokens) for name, each in found.items()}


@TREES
@pytest.mark.parametrize("sampling", SAMPLING)
def test_trees_come_with_the_verdicts(
    method: str,
    sampling: str,
    pair: tuple[Path, Path],
    head: Path,  # noqa: F811
    medusa: Path,  # noqa: F811
    plain: dict[str, dict[str, list[int]]],  # noqa: F811
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the path of a device with kernels, and never by a copy of their own."""
    given = given_for(method, pair, head, medusa)
    expected = run(engine_of(given, method, "coupled"), asked(sampling))
    grown = request.getfixturevalue("grown")
    monkeypatch.setattr(Sampler, "has_kernels", True)
    monkeypatch.setattr(Sampler, "tokens", as_kernels(Sampler.tokens))
    monkeypatch.setattr("speculation.verification.verify._is_native", lambda *_: False)
    monkeypatch.setattr(LateTokens, "__init__", without_download(LateTokens.__init__))
    found = run(engine_of(given, method, "coupled"), asked(sampling))
    assert tokens(found) == {name: plain[sampling][name] for name in found}
    assert told(found) == told(expected)
    assert sum(accepted for _, accepted in told(found).values()) > 0
    assert method == "medusa tree" or grown["trees"] > 10


def as_kernels(choose: Any) -> Any:
    """What takes rows that are further than they say."""

    def tokens(sampler: Sampler, logits: Tensor, rows: Sequence[SamplingRow], further: Tensor | None) -> Any:
        if further is not None:
            places = zip(rows, further.tolist(), strict=True)
            rows = [replace(row, position=row.position + distance) for row, distance in places]
        return choose(sampler, logits, rows)

    return tokens


@TREES
@pytest.mark.parametrize("rule", ["coupled", "standard", "block"])
def test_whoever_must_know_them_waits(
    method: str,
    rule: Verification,
    pair: tuple[Path, Path],
    head: Path,  # noqa: F811
    medusa: Path,  # noqa: F811
    request: pytest.FixtureRequest,
) -> None:
    """By what verifies on a CPU, beside requests that edit logits by what is drafted before."""
    given = given_for(method, pair, head, medusa)
    batches = requests(SEEDED), asked(SEEDED)
    expected = [tokens(run(engine_of(given, method, rule), each)) for each in batches]
    grown = request.getfixturevalue("grown")
    assert tokens(run(engine_of(given, method, rule), requests(SEEDED))) == expected[0]
    grown.clear()
    assert tokens(run(engine_of(given, method, rule), asked(SEEDED))) == expected[1]
    assert method == "medusa tree" or grown["trees"] > 10


@pytest.mark.parametrize("num_tables", [1, 2])
def test_a_level_lies_where_the_host_would_lay_it(num_tables: int) -> None:
    """Of three trees, one of which has no row in it."""
    blocks = [[[9, 2, 5], [3, 7, 8]], [[1, 4], [6, 0]], [[10, 11], [12, 13]]]
    tables = [each[:num_tables] for each in blocks]
    known = [
        SequenceRows([7, 8], 10, tables[0], [0b1011, 0b10101], 7),
        SequenceRows([9], 7, tables[2], [0b111], 5),
    ]
    unknown = [
        SequenceRows([0] * 2, end - 2, its, [1] * 2, root)
        for its, end, root in zip(tables, (12, 1, 9), (7, 0, 5), strict=True)
    ]
    level = LateLevel(
        torch.tensor([[7, 8, 9, 0, 0, 0], [11, 21, 7, 1, 1, 1], [3, 4, 2, -1, -1, -1], [0, 0, 2, 0, 1, 2]]),
        ends=torch.tensor([2, 2, 3]),
        sizes=torch.tensor([5, 1, 3]),
        logit_rows=torch.tensor([0, 1, 1, 1, 2, 2]),
        depth=2,
        block_size=4,
    )
    found, expected = (
        step_inputs(batch, [0] * 6, upload_to(CPU), BlockTable(4, num_tables=num_tables), StepShape())
        for batch in (unknown, known)
    )
    level.fill_rows(found)
    ours, theirs = found.attention, expected.attention
    assert found.token_ids[:3].tolist() == [7, 8, 9]
    assert found.positions[:3].tolist() == expected.positions.tolist() == [9, 9, 7]
    assert ours.visible is not None and torch.equal(ours.visible[:3], theirs.visible)
    assert torch.equal(ours.slot_mapping[..., :3], theirs.slot_mapping)
    assert (ours.slot_mapping[..., 3:] == -1).all()
    assert ours.query_start.tolist() == [0, 2, 2, 3]
    assert ours.context_len.tolist() == [theirs.context_len[0], 1, theirs.context_len[1]]
    assert found.logit_rows.tolist() == [0, 1, 1, 1, 2, 2]
    assert ours.max_context_len >= theirs.max_context_len


def test_a_trees_shape_comes_with_its_tokens() -> None:
    nodes = torch.tensor([[5, 6, 7, 8, 9, 0], [0, 1, 2, 0, 0, -1], [0] * 6, [0, 1, 2, 0, 0, 0]])
    downloads: list[Tensor] = []

    def download(values: Tensor) -> Tensor:
        downloads.append(values)
        return values

    late = LateTrees(nodes, download)  # type: ignore[arg-type]
    chain, star = (Draft([~(3 * tree + node) for node in range(3)], [-1] * 3, late=late) for tree in range(2))
    assert (chain.masks(), chain.depth, chain.num_nodes) == (star.masks(), 1, 3) and not downloads
    assert late.bring(torch.tensor([4]), download) == [4]  # type: ignore[arg-type]
    assert (chain.token_ids, chain.parents, chain.depth) == ([5, 6, 7], [-1, 0, 1], 3)
    assert (star.token_ids, star.parents, star.num_nodes) == ([8, 9, 0], [-1, -1], 2)
    assert star.masks() == [0b1, 0b11, 0b101, 0b1001] and len(downloads) == 1
