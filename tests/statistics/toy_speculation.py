"""A toy model and drafters, small enough for exact enumeration, run through the real verification.

The next token depends on the last token alone: row t of a table has the probabilities after token t.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from engine.batch.runner import Fill, ForwardOutput, Step
from engine.batch.step_inputs import SequenceRows
from engine.sampler import Sampler
from engine.step.draft import Draft
from engine.step.sequence import SequenceState
from protocol.requests import EngineRequest
from protocol.sampling import SamplingParams
from protocol.speculation import SpeculativeConfig, Verification
from speculation.chains import ChainDrafting, DraftRows
from speculation.verification.verify import verify

VOCAB_SIZE = 8
FIRST = 1
"""The prompt's only token."""

NUM_TRIALS = 60_000
"""With so many trials a chi-squared test of pairs detects a deviation of 4 % (RMS) in 98 of 100 cases."""

ALPHA = 1e-4
_CHUNK = 10_000

Propose = Callable[[list[SequenceState]], None]
"""Sets the sequences' drafts."""


def table(seed: int) -> Tensor:
    """Return random probabilities, none too small for a chi-squared test of pairs."""
    logits = 2.0 * torch.randn(VOCAB_SIZE, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed))
    return 0.85 * logits.softmax(dim=1) + 0.15 / VOCAB_SIZE


@dataclass
class Trials:
    """The results: `tokens` [trials, tokens], and the share of drafted tokens that was accepted."""

    tokens: np.ndarray
    drafted: int
    accepted: int

    @property
    def acceptance(self) -> float:
        return self.accepted / self.drafted


def generate(
    model: Tensor, propose: Propose, verification: Verification, count: int = NUM_TRIALS, num_tokens: int = 2
) -> Trials:
    """Generate from one prompt with `count` different seeds, in as many rounds as needed."""
    sampler = Sampler(len(model), "cpu", [])
    found = Trials(np.empty((count, num_tokens), np.int64), 0, 0)
    with _alone():
        for first in range(0, count, _CHUNK):
            sequences = [_sequence(seed) for seed in range(first, min(count, first + _CHUNK))]
            while waiting := [s for s in sequences if len(s.output_token_ids) < num_tokens]:
                propose(waiting)
                _round(model, waiting, verification, sampler, found)
            found.tokens[first : first + _CHUNK] = [s.output_token_ids[:num_tokens] for s in sequences]
    return found


def _sequence(seed: int) -> SequenceState:
    params = SamplingParams(max_tokens=100, seed=seed)
    return SequenceState(EngineRequest(request_id=str(seed), prompt_token_ids=[FIRST], sampling=params), seed)


def _round(
    model: Tensor, sequences: list[SequenceState], verification: Verification, sampler: Sampler, found: Trials
) -> None:
    last = [
        token
        for sequence in sequences
        for token in (sequence.token_ids[-1], *(sequence.draft.token_ids if sequence.draft else ()))
    ]
    verdicts = verify(verification, sequences, model.log()[last], sampler)
    for sequence, verdict in zip(sequences, verdicts, strict=True):
        if sequence.draft is not None:
            found.drafted += sequence.draft.num_nodes
            found.accepted += len(verdict.accepted)
        for token in verdict.token_ids:
            sequence.append(token)
        sequence.draft = None


@contextmanager
def _alone() -> Iterator[None]:
    """Run the block without garbage collection and on one thread, which is faster for small tensors."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        torch.set_num_threads(num_threads)


# --- drafters ---------------------------------------------------------------------------------------


@dataclass
class LogitsRunner:
    """Runs a draft without KV. `logits_of` returns logits [sequences, vocab_size] after the last tokens."""

    vocab_size: int
    logits_of: Callable[[list[int]], Tensor]
    can_fill = False
    chains = None

    def run(self, step: Step, fill: Fill | None = None) -> ForwardOutput:
        return ForwardOutput(self.logits_of([rows.token_ids[-1] for rows in step.batch]), None)

    def draft(
        self, sequences: Sequence[SequenceState], length: int, verification: Verification
    ) -> list[Draft]:
        """Draw chains of `length` tokens by the drafters' own loop."""
        options = SpeculativeConfig(method="ngram", verification=verification)
        runner: Any = self
        drafting = ChainDrafting(runner, options, _rows_of, Sampler(self.vocab_size, "cpu", []))
        rows = [SequenceRows(each.token_ids[-1:], each.position - 1, [[]]) for each in sequences]
        return drafting.draft(sequences, rows, [length] * len(sequences))


def _rows_of(sequence: SequenceState, rows: DraftRows) -> SequenceRows:
    return SequenceRows(rows.token_ids, sequence.position + rows.first, [[]])


def sampled_chain(draft: Tensor, length: int, verification: Verification) -> Propose:
    """Draw drafts from a table, as a draft model does."""
    runner = LogitsRunner(len(draft), lambda last: draft.log()[last])

    def propose(sequences: list[SequenceState]) -> None:
        drafts = runner.draft(sequences, length, verification)
        for sequence, drawn in zip(sequences, drafts, strict=True):
            sequence.draft = drawn

    return propose


def likeliest_chain(draft: Tensor, length: int) -> Propose:
    """Draft the likeliest tokens, without chance."""
    best = draft.argmax(dim=1).tolist()

    def propose(sequences: list[SequenceState]) -> None:
        for sequence in sequences:
            tokens = [sequence.token_ids[-1]]
            for _ in range(length):
                tokens.append(best[tokens[-1]])
            sequence.draft = Draft(tokens[1:])

    return propose


def likeliest_tree(draft: Tensor, widths: Sequence[int]) -> Propose:
    """Draft a tree: at each depth every node gets its likeliest children, as many as `widths` says."""
    order = draft.argsort(dim=1, descending=True).tolist()

    def propose(sequences: list[SequenceState]) -> None:
        for sequence in sequences:
            token_ids, parents = [], []
            level = [(-1, sequence.token_ids[-1])]
            for width in widths:
                children = [(node, child) for node, token in level for child in order[token][:width]]
                level = [(len(token_ids) + i, child) for i, (_, child) in enumerate(children)]
                token_ids += [child for _, child in children]
                parents += [node for node, _ in children]
            sequence.draft = Draft(token_ids, parents)

    return propose


def sampled_siblings(draft: Tensor) -> Propose:
    """Draft two siblings drawn without replacement, and a child of the second."""
    generator = torch.Generator().manual_seed(0)

    def draw(weights: Tensor) -> tuple[Tensor, Tensor]:
        probabilities = weights / weights.sum(dim=1, keepdim=True)
        return torch.multinomial(probabilities, 1, generator=generator)[:, 0], probabilities

    def propose(sequences: list[SequenceState]) -> None:
        left = draft[[sequence.token_ids[-1] for sequence in sequences]].clone()
        drawn = []
        for _ in range(2):
            drawn.append(draw(left))
            left[torch.arange(len(left)), drawn[-1][0]] = 0.0
        drawn.append(draw(draft[drawn[-1][0]]))
        token_ids = torch.stack([tokens for tokens, _ in drawn], dim=1).tolist()
        distributions = torch.stack([probabilities for _, probabilities in drawn], dim=1)
        for sequence, tokens, rows in zip(sequences, token_ids, distributions, strict=True):
            sequence.draft = Draft(tokens, [-1, -1, 1], distributions=rows)

    return propose


# --- tests of the results -----------------------------------------------------------------------------


def assert_fits(tokens: np.ndarray, model: Tensor) -> None:
    """Check that the first token, and the first two together, have the model's own probabilities."""
    for number, name in enumerate(("one", "two"), start=1):
        statistic, value = chi_squared(tokens[:, :number], model)
        assert value > ALPHA, f"{name}: chi-squared {statistic:.0f}, p = {value:.1e}"


def chi_squared(tokens: np.ndarray, model: Tensor) -> tuple[float, float]:
    """Return statistic and p-value of tokens [trials, 1 or more] against exact enumeration."""
    size = len(model)
    exact = model.double()[FIRST].numpy()
    for _ in range(tokens.shape[1] - 1):
        exact = (exact.reshape(-1, size, 1) * model.double().numpy()).ravel()
    cells = np.zeros(len(tokens), np.int64)
    for column in tokens.T:
        cells = cells * size + column
    counts = np.bincount(cells, minlength=len(exact))
    possible = exact > 0
    assert counts[~possible].sum() == 0, "an impossible outcome"
    expected = exact[possible] / exact.sum() * len(tokens)
    assert expected.min() > 5, "too few trials for these probabilities"
    result = stats.chisquare(counts[possible], expected)
    return float(result.statistic), float(result.pvalue)
