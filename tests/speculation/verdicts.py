"""Sequences with drafts of all kinds, with logits that accept some, and verdicts in a form to compare."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from engine.step.draft import Draft, Verdict
from engine.step.sequence import SequenceState
from protocol.requests import EngineRequest
from protocol.sampling import SamplingParams
from protocol.speculation import Verification

VOCAB = 100
RULES: list[Verification] = ["coupled", "standard", "block"]
BY_CHANCE: list[Verification] = ["standard", "block"]
TREE = [-1, -1, -1, 1, 1, 2, 3]


def sequence_with(draft: Draft | None, number: int = 0, **sampling: Any) -> SequenceState:
    params = SamplingParams(max_tokens=50, **({"seed": 7 * number - 300} | sampling))
    prompt = [1, 2, 3] * (1 + number % 5)
    sequence = SequenceState(
        EngineRequest(request_id=str(number), prompt_token_ids=prompt, sampling=params), number
    )
    sequence.draft = draft
    return sequence


class Batch:
    """Sequences, and the logits of their rows."""

    def __init__(self, seed: int, vocab_size: int = VOCAB, dtype: torch.dtype = torch.float32) -> None:
        self.random, self._generator = random.Random(seed), torch.Generator().manual_seed(seed)
        self._vocab_size, self._dtype = vocab_size, dtype
        self.sequences: list[SequenceState] = []
        self.rows: list[Tensor] = []

    @classmethod
    def of_each_kind(cls, seed: int) -> Batch:
        batch = cls(seed)
        batch.add({"temperature": 0.0}, 2)
        batch.add({}, 4, drawn=0.5)
        batch.add({"temperature": 1.5, "top_p": 0.9}, 3)
        batch.add({}, 0)
        batch.add({"top_k": 20}, 1, drawn=0.5)
        batch.add({}, len(TREE), parents=TREE, probes=[0b10000001])
        batch.add({"temperature": 0.0}, len(TREE), parents=TREE)
        return batch

    @classmethod
    def of_many(cls, seed: int) -> Batch:
        """Return chains drawn from distributions near to and far from the target's, and trees of likely
        tokens.
        """
        batch = cls(seed)
        for drawn in (0.3, 0.6, 0.9, 1.2, 1.5):
            batch.add({}, 5, drawn=drawn)
        for _ in range(4):
            batch.add({}, len(TREE), parents=TREE)
        return batch

    @property
    def logits(self) -> Tensor:
        return torch.cat(self.rows)

    def add(
        self,
        params: dict[str, Any],
        count: int,
        drawn: float = 0.0,
        parents: list[int] | None = None,
        probes: Sequence[int] = (),
    ) -> None:
        number = len(self.sequences)
        logits = 1.5 * torch.randn(1 + count + len(probes), self._vocab_size, generator=self._generator)
        logits = logits.to(self._dtype)
        if parents:
            logits[:, 4:] -= 20  # so that siblings take most of the probability
        noise = torch.randn(count, self._vocab_size, generator=self._generator)
        q = (logits[:count].float() + drawn * noise).softmax(dim=1)
        if not count:
            draft = None
        elif drawn:
            tokens = q.multinomial(1, generator=self._generator)[:, 0].tolist()
            draft = Draft(tokens + [7] * len(probes), parents, list(probes), q)
        else:
            draft = Draft(_likeliest(logits, parents, count) + [7] * len(probes), parents, list(probes))
        seed = self.random.getrandbits(40)
        self.sequences.append(sequence_with(draft, number, **{"seed": seed} | params))
        self.rows.append(logits)


def _likeliest(logits: Tensor, parents: list[int] | None, count: int) -> list[int]:
    """Return the likeliest token of each node; siblings differ."""
    before = parents or range(-1, count - 1)
    ranks = [sum(each == parent for each in before[:i]) for i, parent in enumerate(before)]
    likeliest = logits.argsort(dim=1, descending=True)
    return [int(likeliest[1 + parent, rank]) for parent, rank in zip(before, ranks, strict=True)]


def told(verdicts: Sequence[Verdict]) -> list[Any]:
    return [(v.token_ids, v.accepted, v.probed, v.failed, len(v.logprobs)) for v in verdicts]
