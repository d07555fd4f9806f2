"""Drafted tokens that the host learns together with the verdicts equal those that it would know at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from engine.batch.runner import Fill, ForwardOutput, Step
from engine.devices.torch.runner import TorchRunner
from engine.sampler import Sampler
from engine.sampler.rows import needs_history
from engine.step.draft import Draft, late_among
from engine.step.late_tokens import LateTokens
from protocol.requests import EngineRequest
from protocol.speculation import Verification
from speculation import chains
from tests.speculation.small_engine import run, small_config, tokens
from tests.speculation.test_token_equality import (  # noqa: F401
    METHODS,
    ROOMY,
    SAMPLING,
    SEGMENTS,
    Given,
    head,
    medusa,
    plain,
    requests,
)

DRAFTED, SEEDED = 5, "seeded"
NUM_TOKENS = 24
CHAINS = pytest.mark.parametrize("method", ["draft_model", "eagle", "self_speculative", "medusa"])
CPU = torch.device("cpu")


def refuse(*_: object) -> NoReturn:
    raise AssertionError("the drafted tokens come with the verdicts")


@pytest.fixture
def late_steps(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Draft chains as on a GPU, and count the steps that take their tokens from the device."""
    steps: Counter[str] = Counter()
    run = TorchRunner.run

    def counted(self: TorchRunner, step: Step, fill: Fill | None = None) -> ForwardOutput:
        steps["late"] += fill is not None and len(step.batch) < len(step.logit_rows)
        return run(self, step, fill)

    monkeypatch.setattr(TorchRunner, "run", counted)
    monkeypatch.setattr(chains, "stays_on_device", lambda runner, device: runner.can_fill)
    return steps


def engine_of(given: Given, method: str, verification: Verification) -> Any:
    """Make an engine. Engines differ only in the verification rule."""
    deploy = Given.deploy
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            Given, "deploy", lambda self, **options: deploy(self, verification=verification, **options)
        )
        return METHODS[method](given)


def given_for(method: str, pair: tuple[Path, Path], head: Path, medusa: Path) -> Given:  # noqa: F811
    config = small_config(pair[0], round(SEGMENTS.get(method.split()[0], 1.0) * ROOMY), itl_budget=0.0)
    return Given(config, pair[1], head, medusa, {}, DRAFTED)


def asked(sampling: str) -> list[EngineRequest]:
    """Return requests whose drafts the host need not know."""
    return [each for each in requests(sampling, NUM_TOKENS) if not needs_history(each.sampling)]


@CHAINS
@pytest.mark.parametrize("sampling", SAMPLING)
def test_tokens_come_with_the_verdicts(
    method: str,
    sampling: str,
    pair: tuple[Path, Path],
    head: Path,  # noqa: F811
    medusa: Path,  # noqa: F811
    plain: dict[str, dict[str, list[int]]],  # noqa: F811
    late_steps: Counter[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They use the path of a device with kernels, and never a separate copy. One request has no drafts."""
    expected = plain[sampling]
    monkeypatch.setattr(Sampler, "has_kernels", True)
    monkeypatch.setattr("speculation.verification.verify._is_native", lambda *_: False)
    monkeypatch.setattr(LateTokens, "__init__", without_download(LateTokens.__init__))
    engine = engine_of(given_for(method, pair, head, medusa), method, "coupled")
    found = run(engine, asked(sampling))
    assert tokens(found) == {name: expected[name][:NUM_TOKENS] for name in found}
    assert sum(output.accepted_tokens for output in found.values()) > 0
    assert late_steps["late"] > 3


def without_download(init: Any) -> Any:
    return lambda self, on_device, download: init(self, on_device, refuse)


@CHAINS
@pytest.mark.parametrize("rule", ["coupled", "standard", "block"])
def test_requests_that_edit_logits_wait_for_the_tokens(
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
    late_steps = request.getfixturevalue("late_steps")
    engine = engine_of(given, method, rule)
    assert tokens(run(engine, batches[0])) == expected[0]
    late_steps.clear()
    assert tokens(run(engine, batches[1])) == expected[1]
    assert late_steps["late"] > 3


def late_drafts(values: Sequence[int], lengths: Sequence[int]) -> tuple[list[Draft], list[int]]:
    """Return chains on the device, and a list to which each download appends its number of tokens."""
    downloads: list[int] = []

    def download(on_device: torch.Tensor) -> torch.Tensor:
        downloads.append(len(on_device))
        return on_device

    late, names = LateTokens(torch.tensor(values), download), iter(range(len(values)))  # type: ignore[arg-type]
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
    assert draft.late.bring(torch.tensor([1, 2]), lambda found: found) == [1, 2]  # type: ignore[arg-type]
    assert draft.token_ids == [7, 8, 9] and not downloads
