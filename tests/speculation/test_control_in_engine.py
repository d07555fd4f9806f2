"""An engine that controls speculation: it measures, plans and reports, and notices a collapse."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest
import zmq

from costs.widths import UNMEASURED
from engine.batch.runner import ForwardOutput
from engine.engine import Engine
from engine.step.draft import Draft
from engine.step.profiling import ProfilingRun
from engine.step.sequence import SequenceState
from messaging.sockets import ClusterKeys
from protocol.roles import ROLES
from speculation.account import Account
from speculation.control.controller import DraftController
from speculation.control.estimator import Origin, measure_target
from speculation.speculator import BatchSpeculator
from tests.speculation.engines import ask, finish, make_engine, ticks
from tests.worker.tiny_model import VOCAB_SIZE
from worker.parts import WorkerParts

PROMPTS = [[(7 * index + place * place) % VOCAB_SIZE for place in range(20)] for index in range(4)]


@pytest.fixture(scope="module")
def expected(target: Path) -> dict[str, list[int]]:
    engine, _ = make_engine(target, None)
    for index, prompt in enumerate(PROMPTS):
        engine.add(ask(f"r{index}", prompt))
    return finish(engine)


class Proposals:
    """Stands between the speculator and its drafter, and records the requested numbers of tokens."""

    def __init__(self, speculator: BatchSpeculator, monkeypatch: pytest.MonkeyPatch) -> None:
        self.counts: list[dict[str, int]] = []
        drafter = speculator._drafters["draft_model"]
        self._propose = drafter.propose
        monkeypatch.setattr(drafter, "propose", self.propose)

    def propose(self, sequences: Sequence[SequenceState], counts: Sequence[int]) -> list[Draft | None]:
        self.counts.append(
            {sequence.request_id: count for sequence, count in zip(sequences, counts, strict=True)}
        )
        return self._propose(sequences, counts)


def test_mixed_choices_in_one_batch(
    target: Path, expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, speculator = make_engine(target, target)
    proposals = Proposals(speculator, monkeypatch)
    engine.add(ask("r0", PROMPTS[0], num_speculative_tokens=2))
    engine.add(ask("r1", PROMPTS[1], enabled=False))
    engine.add(ask("r2", PROMPTS[2], num_speculative_tokens=0))
    engine.add(ask("r3", PROMPTS[3]))
    assert finish(engine) == expected
    asked = {request_id for counts in proposals.counts for request_id in counts}
    assert {"r0"} <= asked <= {"r0", "r3"}
    assert {counts["r0"] for counts in proposals.counts if "r0" in counts} <= {1, 2}  # 1 at the very end


def test_without_drafts_steps_are_plain(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, speculator = make_engine(target, target, num_speculative_tokens=0)
    proposals = Proposals(speculator, monkeypatch)
    verify: list[object] = []
    monkeypatch.setattr(speculator, "verify", lambda *arguments: verify.append(arguments))
    for index, prompt in enumerate(PROMPTS):
        engine.add(ask(f"r{index}", prompt))
    engine.step()
    while engine.has_work():
        result = engine.step()
        assert result.num_tokens == len(result.outputs) == len(PROMPTS)
    assert proposals.counts == verify == []
    assert 'spec_decode_steps_total{drafts="yes"}' not in engine.counters()


def test_a_perfect_draft_at_no_cost_is_used(
    target: Path, expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks(monkeypatch)
    engine, _ = make_engine(target, target)
    for index, prompt in enumerate(PROMPTS):
        engine.add(ask(f"r{index}", prompt))
    assert finish(engine) == expected
    counters = engine.counters()
    label = '{method="draft_model"}'
    drafted = counters[f"spec_decode_num_draft_tokens_total{label}"]
    assert counters[f"spec_decode_num_accepted_tokens_total{label}"] > 0.9 * drafted > 0


def test_a_prompt_of_one_token_while_a_plan_stands(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This prompt's step is as short as a decoding step, but no request decodes in it."""
    monkeypatch.setattr(DraftController, "_may_pay", lambda *arguments: False)
    engine, _ = make_engine(target, target)
    for name, prompt in (("r0", PROMPTS[0]), ("r1", [7]), ("r2", [9])):
        engine.add(ask(name, prompt, max_tokens=3))
        assert len(finish(engine)[name]) == 3


def test_counters(target: Path) -> None:
    engine, _ = make_engine(target, target, num_speculative_tokens=3)
    engine.add(ask("r0", PROMPTS[0], max_tokens=25))
    finish(engine)
    counters = engine.counters()
    # The first token comes with the prompt, then four at a time.
    assert counters['spec_decode_choices_total{method="draft_model",k="3"}'] == 1
    assert counters['spec_decode_steps_total{drafts="yes"}'] == 6
    assert counters['spec_decode_steps_total{drafts="no"}'] == 1
    assert counters["spec_decode_verify_seconds_total"] > 0
    assert counters['spec_decode_draft_seconds_total{method="draft_model"}'] > 0


class WrongDrafts:
    """Each drafted token differs by `shift` from the target's own, so that all are rejected."""

    def __init__(self, tokens: dict[str, list[int]], shift: int) -> None:
        self._tokens = tokens
        self._shift = shift
        self.counts: list[list[int]] = []

    def propose(self, sequences: Sequence[SequenceState], counts: Sequence[int]) -> list[Draft | None]:
        self.counts.append(list(counts))
        return [self._draft(sequence, count) for sequence, count in zip(sequences, counts, strict=True)]

    def _draft(self, sequence: SequenceState, count: int) -> Draft:
        done = len(sequence.output_token_ids)
        right = self._tokens[sequence.request_id][done : done + count]
        return Draft([(token + self._shift) % VOCAB_SIZE for token in right])


def test_choices_do_not_look_at_the_drafted_tokens(
    target: Path, expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise sampled output would be biased (DSpark, arXiv 2607.05147, appendix A)."""
    counts = []
    for shift in (1, 2):
        with monkeypatch.context() as patch:
            ticks(patch)
            engine, speculator = make_engine(target, target)
            wrong = WrongDrafts(expected, shift)
            drafter = speculator._drafters["draft_model"]
            patch.setattr(drafter, "propose", wrong.propose)
            patch.setattr(drafter, "observe", lambda computed: None)
            for index, prompt in enumerate(PROMPTS):
                engine.add(ask(f"r{index}", prompt))
            assert finish(engine) == expected
            counts.append(wrong.counts)
    assert counts[0] == counts[1]
    assert len(counts[0]) > 0


def test_calibration_leaves_no_trace(target: Path) -> None:
    engine, speculator = make_engine(target, target)
    plain, _ = make_engine(target, None)
    assert engine.blocks.num_free == engine.blocks.num_blocks
    assert engine.blocks._free == list(range(engine.blocks.num_blocks - 1, -1, -1))
    assert engine.stats().steps == plain.stats().steps == 0
    assert engine.counters() == {}
    assert speculator._drafters["draft_model"].num_drafted("profiling-0") == 0


def test_calibration_measures_the_machine(target: Path) -> None:
    engine, speculator = make_engine(target, target)
    state = engine.speculation()
    assert state is not None and state.max_tokens == 8
    seconds = state.step_time.seconds
    assert 0 < seconds[0][0] < seconds[-1][-1]
    (method,) = state.methods
    assert method.start_s + method.level_s + method.token_s > 0
    assert 0 < speculator._controller.estimator.target.per_prompt_token < seconds[0][0]
    assert not speculator._controller.estimator.methods["draft_model"].reads_prompts


class TimedProfiling(ProfilingRun):
    """A profiling run whose rows take `row_s` each, by a clock of its own."""

    def __init__(self, engine: Engine, longest: int, row_s: float, patch: pytest.MonkeyPatch) -> None:
        super().__init__(engine.blocks, engine._runner, longest)
        self.asked: list[tuple[int, int, int]] = []
        self._row_s, self._now = row_s, 0.0
        patch.setattr("speculation.control.estimator.time.perf_counter", lambda: self._now)

    def sequences(self, count: int, num_tokens: int, room: int) -> list[SequenceState] | None:
        self.asked.append((count, num_tokens, room))
        return super().sequences(count, num_tokens, room)

    def forward(self, sequences: list[SequenceState], *, wants_hidden: bool = True) -> ForwardOutput:
        drafts = [each.draft.num_nodes for each in sequences if each.draft is not None]
        self._now += self._row_s * (sum(each.num_uncomputed for each in sequences) + sum(drafts))
        return super().forward(sequences, wants_hidden=wants_hidden)


@pytest.mark.parametrize(
    ("longest", "row_s", "sequences", "rows", "prompt"),
    [
        (512, 1e-3, 4, [1, 2, 4, 8, 16, 32], 256),
        (100, 1e-4, 1, [1, 2, 4, 8, 16, 32], 99),
        (512, 1e-4, 4, [1, 2, 4, 8, 16, 32, 64, 128], 256),
        (512, 20e-3, 4, [1, 2], 256),
    ],
)
def test_forwards_are_measured_up_to_some_time_and_the_batch_size(
    longest: int,
    row_s: float,
    sequences: int,
    rows: list[int],
    prompt: int,
    target: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, _ = make_engine(target, None)
    with closing(TimedProfiling(engine, longest, row_s, monkeypatch)) as profiling:
        curve = measure_target(profiling, lambda sequences, logits: [], sequences)
        assert curve.rows == rows and curve.seconds == pytest.approx([row_s * count for count in rows])
        assert curve.per_prompt_token == pytest.approx(row_s)
        assert profiling.asked[-1] == (1, prompt, 1)


def test_a_forward_that_is_slow_from_the_start_is_not_measured(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, _ = make_engine(target, None)
    with closing(TimedProfiling(engine, 512, 30e-3, monkeypatch)) as profiling:
        assert measure_target(profiling, lambda sequences, logits: [], 4) is UNMEASURED


def test_lengths_of_answers_are_learned_when_they_end(target: Path) -> None:
    engine, speculator = make_engine(target, target)
    estimator = speculator._controller.estimator
    for index in range(80):
        engine.add(ask(f"r{index}", PROMPTS[index % 4], max_tokens=6))
        finish(engine)
    assert estimator.mean_output == pytest.approx(6, abs=3)
    assert estimator.mean_prompt < 12, "most of the prompts' tokens were found in the cache"
    assert not speculator._requests and speculator._num_speculating == 0


def test_calibration_in_a_pool_that_is_too_small(target: Path) -> None:
    engine, _ = make_engine(target, target, max_num_seqs=1)
    engine.add(ask("r0", PROMPTS[0]))
    assert len(finish(engine)["r0"]) == 24


def test_without_a_method_only_step_costs_are_published(target: Path) -> None:
    engine, _ = make_engine(target, None)
    state = engine.speculation()
    assert state is not None and state.max_tokens == 0 and state.methods == []


def test_the_workers_state_has_the_controllers(target: Path) -> None:
    engine, _ = make_engine(target, target)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    parts = WorkerParts(
        config=engine.config,
        role=ROLES["decode"],
        worker_id="d0",
        incarnation="i",
        host="127.0.0.1",
        keys=ClusterKeys.generate(),
        context=context,
    )
    parts.engine = engine
    engine.add(ask("r0", PROMPTS[0], num_speculative_tokens=2))
    for _ in range(3):
        engine.step()
    speculation = parts.state().speculation
    context.term()
    assert speculation is not None
    (method,) = speculation.methods
    assert (method.num_requests, method.num_tokens) == (1, 2)


def origin_of(engine: Engine, speculator: BatchSpeculator, request_id: str) -> str:
    while request_id not in speculator._requests:
        engine.step()
    return speculator._requests[request_id].origin


def test_the_origin_of_a_requests_kv(target: Path) -> None:
    engine, speculator = make_engine(target, target)
    prompt = [place % 50 for place in range(40)]
    engine.add(ask("computed", prompt))
    assert origin_of(engine, speculator, "computed") == "computed"
    finish(engine)
    engine.add(ask("hit", prompt))
    assert origin_of(engine, speculator, "hit") == "prefix_hit"
    reservation = engine.reserve(ask("handed", PROMPTS[0]))
    assert reservation is not None
    engine.activate(reservation, 5, len(PROMPTS[0]))
    assert origin_of(engine, speculator, "handed") == "handed_over"


def feed(account: Account, rate: float, count: int, origin: Origin = "computed", seed: int = 0) -> int:
    """Return how often the account raised the alarm."""
    name = f'spec_acceptance_collapsed_total{{method="eagle",origin="{origin}"}}'
    before, chance = account.counters().get(name, 0), random.Random(seed)
    for _ in range(count):
        account.observed_first("eagle", origin, chance.random() < rate)
    return int(account.counters().get(name, 0) - before)


def test_a_collapse_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    account = Account()
    assert feed(account, 0.7, 2000) == 0
    with caplog.at_level(logging.WARNING, "tandem.speculation"):
        assert feed(account, 0.0, 500) == 1
    (line,) = caplog.messages
    assert "eagle" in line and "computed" in line


def test_a_collapse_is_reported_again_after_a_recovery() -> None:
    account = Account()
    alarms = [feed(account, rate, 1000) for rate in (0.7, 0.1, 0.7, 0.7, 0.7, 0.1)]
    assert alarms == [0, 1, 0, 0, 0, 1]


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.95])
def test_chance_raises_no_alarm(rate: float) -> None:
    assert feed(Account(), rate, 20_000) == 0


def test_classes_do_not_hide_each_other() -> None:
    account = Account()
    for _ in range(8):
        assert feed(account, 0.7, 250, "computed") + feed(account, 0.7, 250, "handed_over") == 0
    assert feed(account, 0.7, 500, "computed") == 0
    assert feed(account, 0.0, 500, "handed_over") == 1


def test_log_lines_are_limited(caplog: pytest.LogCaptureFixture) -> None:
    account = Account()
    origins: tuple[Origin, ...] = ("computed", "prefix_hit", "handed_over")
    for origin in origins:
        feed(account, 0.7, 1000, origin)
    assert sum(feed(account, 0.0, 500, origin) for origin in origins) == 3
    assert len(caplog.messages) == 1
