"""Speculation: a cheap drafter proposes tokens, the model verifies all of them in one step, and no token
changes.

    python -m labs.speculation

`decode` is the loop, `verify` the rule that keeps the model's distribution (Leviathan et al., 2023; Chen et
al., 2023). A sweep over the number of drafts K shows where speculation pays, and the gain predicted from the
acceptance rate and the cost of a draft.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from labs.decoding import DRAFT, TARGET, Cache, Llama, common_prefix, read_prompt

CAPACITY = 1024
Drafter = Callable[[list[int], int], tuple[list[int], Tensor]]
"""A function that drafts at most K tokens after a text, and returns them with their distributions [drafts,
vocabulary].
"""


def chances(logits: Tensor, temperature: float) -> Tensor:
    """Return the distribution of the next token. At temperature 0 the most likely token has probability 1."""
    if temperature == 0:
        return F.one_hot(logits.argmax(-1), logits.shape[-1]).float()
    return (logits / temperature).softmax(-1)


def draw(weights: Tensor) -> int:
    return int(torch.multinomial(weights, 1))


class DraftModel:
    """A drafter that draws tokens one by one from a smaller model, with a cache of its own."""

    def __init__(self, model: Llama, temperature: float) -> None:
        self._model, self._temperature = model, temperature
        self._cache, self._cached = Cache(model, CAPACITY), list[int]()

    def __call__(self, text: list[int], count: int) -> tuple[list[int], Tensor]:
        # Rejected drafts are overwritten. The last token is always computed, for its logits.
        self._cache.length = min(common_prefix(self._cached, text), len(text) - 1)
        self._cached, origins = list(text), []
        for _ in range(count):
            logits = self._cache.compute(self._model, self._cached[self._cache.length :])
            origins.append(chances(logits[-1], self._temperature))
            self._cached.append(draw(origins[-1]))
        return self._cached[len(text) :], torch.stack(origins)


def look_up(text: list[int], count: int, suffix: int = 2) -> tuple[list[int], Tensor]:
    """Draft the tokens that followed an earlier occurrence of the text's last tokens (prompt lookup), at
    almost no cost.
    """
    drafts: list[int] = []
    for start in range(len(text) - suffix - 1, -1, -1):
        if text[start : start + suffix] == text[-suffix:]:
            drafts = text[start + suffix :][:count]
            break
    return drafts, F.one_hot(torch.tensor(drafts, dtype=torch.long), 4096).float()


def verify(drafts: list[int], drawn_from: Tensor, target: Tensor) -> list[int]:
    """Return the tokens that a step commits: accepted drafts, and one more of the target's.

    `target`: [drafts + 1, vocabulary]. A draft is accepted with probability min(1, p / q). At the first
    rejected draft, a token is drawn from the normalized excess of p over q. The result is a draw from p.
    """
    for index, draft in enumerate(drafts):
        p, q = target[index], drawn_from[index]
        if torch.rand(()) >= p[draft] / q[draft]:
            return [*drafts[:index], draw((p - q).clamp(min=0))]
    return [*drafts, draw(target[-1])]


@dataclass
class Run:
    """Counts of a run. `tried` counts the drafts that the target judged: the accepted ones and each step's
    first rejected one.
    """

    tokens: list[int]
    seconds: float = 0.0
    draft_seconds: float = 0.0
    steps: int = 0
    drafted: int = 0
    tried: int = 0
    accepted: int = 0

    @property
    def acceptance(self) -> float:
        return self.accepted / self.tried if self.tried else 0.0


def decode(
    model: Llama, prompt: list[int], count: int, drafter: Drafter, num_drafts: int, temperature: float
) -> Run:
    """Decode at least `count` tokens, with up to `num_drafts` drafts a step."""
    cache, text = Cache(model, CAPACITY), list(prompt)
    cache.compute(model, prompt[:-1])
    run = Run(tokens=[])
    start = time.perf_counter()
    while len(text) < len(prompt) + count:
        before_draft = time.perf_counter()
        drafts, drawn_from = drafter(text, num_drafts) if num_drafts else ([], torch.empty(0))
        run.draft_seconds += time.perf_counter() - before_draft
        target = chances(cache.compute(model, [text[-1], *drafts]), temperature)
        committed = verify(drafts, drawn_from, target)
        text += committed
        cache.length = len(text) - 1  # forget the rejected ones
        run.steps += 1
        run.drafted += len(drafts)
        run.accepted += len(committed) - 1
        run.tried += min(len(committed), len(drafts))
    run.seconds, run.tokens = time.perf_counter() - start, text[len(prompt) :]
    return run


def expected_tokens(acceptance: float, num_drafts: int) -> float:
    """Return the expected tokens per step if each draft is accepted with this probability: 1 + a + a^2 + ...
    + a^K.
    """
    return sum(acceptance**index for index in range(num_drafts + 1))


def expected_speed(acceptance: float, num_drafts: int, draft_cost: float) -> float:
    """Return the expected speedup if many rows cost as much as one. `draft_cost` is the cost of a draft, in
    steps.
    """
    return expected_tokens(acceptance, num_drafts) / (1 + num_drafts * draft_cost)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--drafts", type=int, nargs="+", default=[1, 2, 3, 4, 6, 8], help="each K to try")
    parser.add_argument("--temperature", type=float, default=0.0)
    options = parser.parse_args()
    target = Llama(TARGET)
    prompt = read_prompt(Tokenizer.from_file(str(TARGET / "tokenizer.json")), 256)
    draft_model = DraftModel(Llama(DRAFT), options.temperature)
    drafters: dict[str, Drafter] = {"1 M model": draft_model, "prompt lookup": look_up}

    decode(target, prompt, 16, look_up, 0, options.temperature)  # warm up
    plain = decode(target, prompt, options.tokens, look_up, 0, options.temperature)
    step = plain.seconds / plain.steps
    print(f"Without drafts: {step * 1e3:.2f} ms per token")
    print(
        f"{'':14}{'K':>3}{'accepted':>10}{'tokens/step':>13}{'expected':>10}{'cost':>7}{'speed':>7}{'expected':>10}"
    )
    for name, drafter in drafters.items():
        for count in options.drafts:
            run = decode(target, prompt, options.tokens, drafter, count, options.temperature)
            cost = run.draft_seconds / max(run.drafted, 1) / step
            speed = step / (run.seconds / len(run.tokens))
            print(
                f"{name:14}{count:3}{run.acceptance:10.0%}{len(run.tokens) / run.steps:13.2f}"
                f"{expected_tokens(run.acceptance, count):10.2f}{cost:7.2f}{speed:7.2f}"
                f"{expected_speed(run.acceptance, count, cost):10.2f}"
            )
            if options.temperature == 0 and run.tokens[: options.tokens] != plain.tokens[: options.tokens]:
                raise RuntimeError(f"{name} changed the text")


if __name__ == "__main__":
    main()
