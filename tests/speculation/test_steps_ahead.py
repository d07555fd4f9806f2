"""Steps launched ahead beside speculation, in the workers' engine: the tokens equal those without either."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.engine import Engine
from protocol.config import ServeConfig
from protocol.requests import DraftPlan, EngineRequest
from protocol.sampling import SamplingParams
from protocol.speculation import RequestSpeculation, SpeculativeConfig
from speculation.speculator import BatchSpeculator
from tests.e2e.architectures import write_model
from tests.engine.late_device import LateDevice, put_on_late_device
from tests.speculation.small_engine import prompt_of, small_config
from worker.setup import build_engine

MakeEngine = Callable[..., tuple[Engine, LateDevice]]
WORDS = [5, 6, 7]
SAMPLED = {"temperature": 0.9, "top_p": 0.9}
NGRAM = RequestSpeculation(method="ngram", num_speculative_tokens=3)


@pytest.fixture
def make_engine(target: Path) -> MakeEngine:
    def make(ahead: bool = True, **options: Any) -> tuple[Engine, LateDevice]:
        config: ServeConfig = small_config(target, itl_budget=0.0, **options)
        engine, _ = build_engine(config)
        assert isinstance(engine._speculator, BatchSpeculator)
        return engine, put_on_late_device(engine, ahead=ahead)

    return make


def ask(
    name: str, max_tokens: int, speculation: RequestSpeculation | None = None, **sampling: Any
) -> EngineRequest:
    """Make a request of few allowed words, so that prompt lookup finds them again."""
    prompt = prompt_of(24, ord(name))
    params: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "seed": ord(name)}
    params |= {"allowed_token_ids": WORDS} | sampling
    return EngineRequest(
        request_id=name,
        prompt_token_ids=prompt,
        sampling=SamplingParams(max_tokens=max_tokens, **params),
        speculation=speculation,
    )


class Play:
    """Runs an engine. `kinds` records of each step whether it was launched ahead and verified drafts."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.tokens: dict[str, list[int]] = {}
        self.kinds: list[tuple[bool, bool]] = []

    def step(self) -> None:
        was_ahead, verified = self.engine._launcher.is_ahead, self._num_verified
        for output in self.engine.step().outputs:
            assert output.error is None
            self.tokens.setdefault(output.request_id, []).extend(output.token_ids)
        self.kinds.append((was_ahead, self._num_verified > verified))

    def steps(self, count: int) -> list[tuple[bool, bool]]:
        for _ in range(count):
            self.step()
        return self.kinds[-count:]

    def finish(self) -> dict[str, list[int]]:
        while self.engine.has_work():
            self.step()
        assert self.engine.blocks.available == self.engine.blocks.num_blocks
        return self.tokens

    @property
    def _num_verified(self) -> float:
        return self.engine.counters().get('spec_decode_steps_total{drafts="yes"}', 0.0)

    @property
    def num_ahead(self) -> int:
        return sum(was_ahead for was_ahead, _ in self.kinds)

    @property
    def num_verified(self) -> int:
        assert not any(was_ahead and verified for was_ahead, verified in self.kinds)
        return sum(verified for _, verified in self.kinds)


@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_a_speculating_request_beside_a_plain_one(make_engine: MakeEngine, sampling: dict[str, Any]) -> None:
    """No step is launched ahead while it runs. Before and after, all are."""
    play, plain = Play(make_engine()[0]), Play(make_engine(ahead=False)[0])
    for each, speculation in ((play, NGRAM), (plain, None)):
        each.engine.add(ask("a", 80, **sampling))
        each.engine.add(ask("b", 70, RequestSpeculation(enabled=False), **sampling))
        each.steps(10)
        each.engine.add(ask("c", 25, speculation, **sampling))
        each.finish()
    assert play.tokens == plain.tokens
    assert plain.num_ahead == plain.num_verified == 0
    drafting = [place for place, (_, verified) in enumerate(play.kinds) if verified]
    assert drafting
    beside = [was_ahead for was_ahead, _ in play.kinds[drafting[0] : drafting[-1] + 1]]
    assert not any(beside)
    assert all(was_ahead for was_ahead, _ in play.kinds[1:10] + play.kinds[-10:])


def test_a_request_that_starts_to_speculate(make_engine: MakeEngine) -> None:
    """The running step stays plain, and the next one drafts."""
    play, plain = Play(make_engine()[0]), Play(make_engine(ahead=False)[0])
    for each in (play, plain):
        asked = ask("a", 60, RequestSpeculation(num_speculative_tokens=3))
        each.engine.add(msgspec.structs.replace(asked, draft_plan=DraftPlan()))
        each.engine.add(ask("b", 60))
    assert play.steps(6) == [(False, False)] + [(True, False)] * 5
    assert play.engine._launcher.is_ahead
    play.engine.replan("a", DraftPlan(method="ngram"))
    assert play.steps(1) == [(True, False)]
    assert not any(was_ahead for was_ahead, _ in play.steps(10))
    play.engine.replan("a", DraftPlan())
    assert not play.steps(1)[0][0]
    assert play.steps(5) == [(True, False)] * 5
    assert play.finish() == plain.finish()
    assert play.num_verified > 0


@pytest.mark.parametrize("model_type", ["qwen3_5_text", "nemotron_h"])
def test_drafts_of_a_model_with_recurrent_layers(tmp_path: Path, model_type: str) -> None:
    """After steps launched ahead, the state may still be one grid point behind."""
    write_model(model_type, tmp_path)
    options: dict[str, Any] = {"max_num_seqs": 2, "kv_cache_memory_bytes": 2**22, "itl_budget": 0.0}
    play, plain = (Play(build_engine(small_config(tmp_path, **options))[0]) for _ in range(2))
    put_on_late_device(play.engine, ahead=True)
    for each in (play, plain):
        asked = ask("a", 130, RequestSpeculation(num_speculative_tokens=3))
        each.engine.add(msgspec.structs.replace(asked, draft_plan=DraftPlan()))
        each.engine.add(ask("b", 130))
    for turn in range(18):
        play.steps(3)
        play.engine.replan("a", DraftPlan(method="ngram" if turn % 2 == 0 else None))
    play.engine.replan("a", DraftPlan())
    assert play.finish() == plain.finish()
    assert play.num_ahead > 20 and play.num_verified > 10


def test_requests_whose_drafts_do_not_pay(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """All steps are launched ahead except those that are planned."""
    monkeypatch.setattr("speculation.control.controller._is_faster", lambda *_: False)
    monkeypatch.setattr("costs.drafting.Explorer.tries", lambda *_: False)
    options = {"speculative_config": SpeculativeConfig(method="ngram")}
    play, plain = Play(make_engine(**options)[0]), Play(make_engine(ahead=False)[0])
    for each in (play, plain):
        for name in "abc":
            each.engine.add(ask(name, 80))
        each.finish()
    assert play.tokens == plain.tokens
    assert play.num_verified == 0
    assert play.num_ahead > 70
    counters = play.engine.counters()
    assert counters['spec_decode_steps_total{drafts="no"}'] == len(play.kinds)


def test_a_request_aborted_during_its_step(make_engine: MakeEngine) -> None:
    play, plain = Play(make_engine()[0]), Play(make_engine(ahead=False)[0])
    for each, speculation in ((play, NGRAM), (plain, None)):
        each.engine.add(ask("a", 40))
        each.engine.add(ask("b", 60))
        each.steps(5)
        each.engine.abort("a")
        each.engine.add(ask("c", 20, speculation))
        each.finish()
    assert play.tokens == plain.tokens
    assert play.num_ahead > 20 and play.num_verified > 0
