"""Trees grown on the device, which the host learns together with the verdicts, equal those grown on the host.

Draft models grow them by Triton kernels: `tests/engine/devices/test_interpreted_kernels.py` runs these tests
with Triton's interpreter.
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

from engine.sampler import Sampler, SamplingRow
from engine.step.draft import Draft
from engine.step.late_tokens import LateTokens
from engine.step.late_trees import LateTrees
from protocol.outputs import TokenOutput
from protocol.speculation import Verification
from speculation import tree_drafting
from speculation.tree_growth import TreeGrowth
from tests.speculation.small_engine import INTERPRETED, run, tokens
from tests.speculation.test_late_tokens import (
    NUM_TOKENS,
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

TREES = pytest.mark.parametrize(
    "method",
    [
        pytest.param("draft_model tree", marks=INTERPRETED),
        pytest.param("eagle tree", marks=INTERPRETED),
        "medusa tree",
    ],
)


@pytest.fixture
def grown(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Grow trees as on a GPU, and count them."""
    counts: Counter[str] = Counter()
    end = TreeGrowth.end

    def counted(self: TreeGrowth, *args: Any) -> Tensor:
        counts["trees"] += len(self._rooms)
        return end(self, *args)

    monkeypatch.setattr(TreeGrowth, "end", counted)
    monkeypatch.setattr(tree_drafting, "stays_on_device", lambda *_: True)
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
    """They use the path of a device with kernels, and never a separate copy."""
    given = given_for(method, pair, head, medusa)
    expected = run(engine_of(given, method, "coupled"), asked(sampling))
    grown = request.getfixturevalue("grown")
    monkeypatch.setattr(Sampler, "has_kernels", True)
    monkeypatch.setattr(Sampler, "tokens", as_kernels(Sampler.tokens))
    monkeypatch.setattr("speculation.verification.verify._is_native", lambda *_: False)
    monkeypatch.setattr(LateTokens, "__init__", without_download(LateTokens.__init__))
    found = run(engine_of(given, method, "coupled"), asked(sampling))
    assert tokens(found) == {name: plain[sampling][name][:NUM_TOKENS] for name in found}
    assert told(found) == told(expected)
    assert sum(accepted for _, accepted in told(found).values()) > 0
    assert method == "medusa tree" or grown["trees"] > 10


def as_kernels(choose: Any) -> Any:
    """Wrap a choice to accept the distance of each row beyond its position, as kernels do."""

    def tokens(sampler: Sampler, logits: Tensor, rows: Sequence[SamplingRow], further: Tensor | None) -> Any:
        if further is not None:
            places = zip(rows, further.tolist(), strict=True)
            rows = [replace(row, position=row.position + distance) for row, distance in places]
        return choose(sampler, logits, rows)

    return tokens


@pytest.mark.parametrize(
    ("method", "rule"),
    [
        *(("medusa tree", rule) for rule in ("coupled", "standard", "block")),
        pytest.param("draft_model tree", "coupled", marks=INTERPRETED),
        pytest.param("draft_model tree", "standard", marks=INTERPRETED),
        pytest.param("eagle tree", "block", marks=INTERPRETED),
    ],
)
def test_requests_that_edit_logits_wait_for_the_trees(
    method: str,
    rule: Verification,
    pair: tuple[Path, Path],
    head: Path,  # noqa: F811
    medusa: Path,  # noqa: F811
    request: pytest.FixtureRequest,
) -> None:
    """They use the verification of a CPU, beside requests whose edits depend on drafted tokens."""
    given = given_for(method, pair, head, medusa)
    batches = requests(SEEDED, NUM_TOKENS), asked(SEEDED)
    engine = engine_of(given, method, rule)
    expected = [tokens(run(engine, each)) for each in batches]
    grown = request.getfixturevalue("grown")
    engine = engine_of(given, method, rule)
    assert tokens(run(engine, batches[0])) == expected[0]
    grown.clear()
    assert tokens(run(engine, batches[1])) == expected[1]
    assert method == "medusa tree" or grown["trees"] > 10


def test_a_trees_shape_is_downloaded_with_its_tokens() -> None:
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
