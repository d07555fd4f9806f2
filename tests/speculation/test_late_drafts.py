"""Drafts that the host learns together with the verdicts equal those that it would know at once.

Draft models grow trees by Triton kernels: `tests/engine/devices/test_interpreted_kernels.py` runs these tests
with Triton's interpreter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor

from engine.batch.runner import Fill, ForwardOutput, Step
from engine.devices.torch.runner import TorchRunner
from engine.sampler import Sampler, SamplingRow
from engine.sampler.rows import needs_history
from engine.step.draft import Draft, LateTokens, LateTrees, late_among
from protocol.outputs import TokenOutput
from protocol.requests import EngineRequest
from protocol.speculation import Verification
from speculation import chains, tree_drafting
from speculation.tree_growth import TreeGrowth
from tests.speculation.methods import METHODS, ROOMY, Given, requests
from tests.speculation.scripted import Answers
from tests.speculation.small_engine import INTERPRETED, drafted_and_accepted, run, tokens

NUM_TOKENS = 24


def refuse(*_: object) -> NoReturn:
    raise AssertionError("the drafted tokens come with the verdicts")


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Make drafts as on a GPU, and count the steps that take chains from the device, and the trees."""
    counts: Counter[str] = Counter()
    run, end = TorchRunner.run, TreeGrowth.end

    def counted_run(self: TorchRunner, step: Step, fill: Fill | None = None) -> ForwardOutput:
        counts["chains"] += fill is not None and len(step.batch) < len(step.logit_rows)
        return run(self, step, fill)

    def counted_end(self: TreeGrowth, *args: Any) -> Tensor:
        counts["trees"] += len(self._rooms)
        return end(self, *args)

    monkeypatch.setattr(TorchRunner, "run", counted_run)
    monkeypatch.setattr(TreeGrowth, "end", counted_end)
    monkeypatch.setattr(chains, "stays_on_device", lambda runner, device: runner.can_fill)
    monkeypatch.setattr(tree_drafting, "stays_on_device", lambda *_: True)
    return counts


def assert_late(counts: Counter[str], method: str) -> None:
    """Medusa's trees have a shape that the host knows."""
    assert method == "medusa tree" or (counts["trees"] > 10 if "tree" in method else counts["chains"] > 3)


def outputs_of(
    given: Given, method: str, asked: Sequence[EngineRequest], rule: Verification = "coupled"
) -> dict[str, TokenOutput]:
    return run(engine_of(given, method, rule), asked)


def engine_of(given: Given, method: str, rule: Verification) -> Any:
    deploy = Given.deploy
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Given, "deploy", lambda self, **options: deploy(self, verification=rule, **options))
        return METHODS[method](given.with_room(method, ROOMY, itl_budget=0.0, compile="off"))


def asked_of(sampling: str) -> list[EngineRequest]:
    """Return requests whose drafts the host need not know."""
    return [each for each in requests(sampling, NUM_TOKENS) if not needs_history(each.sampling)]


@pytest.mark.parametrize(
    ("method", "sampling"),
    [
        ("draft_model", "seeded"),
        ("eagle", "greedy"),
        ("self_speculative", "seeded"),
        ("medusa", "greedy"),
        ("medusa tree", "seeded"),
        pytest.param("draft_model tree", "greedy", marks=INTERPRETED),
        pytest.param("eagle tree", "seeded", marks=INTERPRETED),
    ],
)
def test_drafts_come_with_the_verdicts(
    method: str,
    sampling: str,
    given: Given,
    plain: dict[str, Answers],
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They use the path of a device with kernels, and never a separate copy. One request has no drafts."""
    expected = outputs_of(given, method, asked_of(sampling)) if "tree" in method else None
    late = request.getfixturevalue("late")
    monkeypatch.setattr(Sampler, "has_kernels", True)
    monkeypatch.setattr(Sampler, "tokens", as_kernels(Sampler.tokens))
    monkeypatch.setattr("speculation.verification.verify._is_native", lambda *_: False)
    monkeypatch.setattr(LateTokens, "__init__", without_download(LateTokens.__init__))
    found = outputs_of(given, method, asked_of(sampling))
    assert tokens(found) == {name: plain[sampling][name][:NUM_TOKENS] for name in found}
    assert drafted_and_accepted(found)[1] > 0
    assert expected is None or drafted_and_accepted(found) == drafted_and_accepted(expected)
    assert_late(late, method)


def without_download(init: Any) -> Any:
    return lambda self, on_device, download: init(self, on_device, refuse)


def as_kernels(choose: Any) -> Any:
    """Wrap a choice to accept the distance of each row beyond its position, as kernels do."""

    def tokens(sampler: Sampler, logits: Tensor, rows: Sequence[SamplingRow], further: Any = None) -> Any:
        if further is not None:
            places = zip(rows, further.tolist(), strict=True)
            rows = [replace(row, position=row.position + distance) for row, distance in places]
        return choose(sampler, logits, rows)

    return tokens


@pytest.mark.parametrize(
    ("method", "rule"),
    [
        ("draft_model", "coupled"),
        ("eagle", "standard"),
        ("self_speculative", "block"),
        ("medusa tree", "standard"),
        pytest.param("draft_model tree", "coupled", marks=INTERPRETED),
        pytest.param("eagle tree", "block", marks=INTERPRETED),
    ],
)
def test_requests_that_edit_logits_wait_for_the_drafts(
    method: str, rule: Verification, given: Given, request: pytest.FixtureRequest
) -> None:
    """They use the verification of a CPU, beside requests whose edits depend on drafted tokens."""
    batches = requests("seeded", NUM_TOKENS), asked_of("seeded")
    engine = engine_of(given, method, rule)
    expected = [tokens(run(engine, each)) for each in batches]
    late = request.getfixturevalue("late")
    engine = engine_of(given, method, rule)
    assert tokens(run(engine, batches[0])) == expected[0]
    late.clear()
    assert tokens(run(engine, batches[1])) == expected[1]
    assert_late(late, method)


def late_drafts(values: Sequence[int], lengths: Sequence[int]) -> tuple[list[Draft], list[int]]:
    """Return chains on the device, and a list to which each download appends its number of tokens."""
    downloads: list[int] = []

    def download(on_device: torch.Tensor) -> torch.Tensor:
        downloads.append(len(on_device))
        return on_device

    downloader: Any = download
    late, names = LateTokens(torch.tensor(values), downloader), iter(range(len(values)))
    return [Draft([~next(names) for _ in range(length)], late=late) for length in lengths], downloads


def test_drafted_tokens_are_downloaded_once() -> None:
    drafts, downloads = late_drafts([7, 8, 9], [1, 2])
    assert [draft.num_nodes for draft in drafts] == [draft.depth for draft in drafts] == [1, 2]
    assert [draft.masks() for draft in drafts] == [None, None] and not downloads
    assert late_among([None, *drafts]) is drafts[1].late is not None
    assert [draft.token_ids for draft in drafts] == [[7], [8, 9]] == [draft.ids for draft in drafts]
    assert downloads == [3] and late_among(drafts) is None
    assert drafts[1].path(1) == [8, 9]


def test_tokens_of_another_step_are_read_at_their_place() -> None:
    (first,), _ = late_drafts([7], [1])
    (other,), downloads = late_drafts([8], [1])
    late = late_among([first, other])
    assert (first.ids_beside(late), other.ids_beside(late)) == ([-1], [8])
    assert downloads == [1] and first.late is late


def test_tokens_fill_the_rows_that_name_them() -> None:
    (draft,), downloads = late_drafts([7, 8, 9], [3])
    assert draft.late is not None
    nodes = torch.tensor([[-3, -1], [5, 0], [-1, 1], [0, 2]])
    draft.late.fill_ids(nodes[:, 0])
    assert nodes.tolist() == [[9, -1], [5, 0], [7, 1], [0, 2]]
    download: Any = lambda found: found  # noqa: E731
    assert draft.late.bring(torch.tensor([1, 2]), download) == [1, 2]
    assert draft.token_ids == [7, 8, 9] and not downloads


def test_a_trees_shape_is_downloaded_with_its_tokens() -> None:
    nodes = torch.tensor([[5, 6, 7, 8, 9, 0], [0, 1, 2, 0, 0, -1], [0] * 6, [0, 1, 2, 0, 0, 0]])
    downloads: list[Tensor] = []

    def download(values: Tensor) -> Tensor:
        downloads.append(values)
        return values

    downloader: Any = download
    late = LateTrees(nodes, downloader)
    chain, star = (Draft([~(3 * tree + node) for node in range(3)], [-1] * 3, late=late) for tree in range(2))
    assert (chain.masks(), chain.depth, chain.num_nodes) == (star.masks(), 1, 3) and not downloads
    assert late.bring(torch.tensor([4]), downloader) == [4]
    assert (chain.token_ids, chain.parents, chain.depth) == ([5, 6, 7], [-1, 0, 1], 3)
    assert (star.token_ids, star.parents, star.num_nodes) == ([8, 9, 0], [-1, -1], 2)
    assert star.masks() == [0b1, 0b11, 0b101, 0b1001] and len(downloads) == 1
