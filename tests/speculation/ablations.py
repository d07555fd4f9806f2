"""An ablation of the rules of "auto" on the simulated server: the same runs without one rule each.

`python -m tests.speculation.ablations` prints the table of docs/benchmarks.md.
"""

from __future__ import annotations

import math
import multiprocessing
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest

from bench.report import markdown_table
from costs import drafting, widths
from costs.drafting import Explorer, MethodAcceptance
from costs.widths import UNMEASURED, DraftTime, TargetTime
from speculation.control import controller, estimator
from speculation.control.controller import DraftController
from speculation.control.estimator import Estimator
from tests.speculation import simulated
from tests.speculation.simulated import PROFILES, Profile, SimulatedServer, target_seconds

Patch = Callable[[pytest.MonkeyPatch], None]


def constants(module: Any, **values: float) -> Patch:
    def patch(patcher: pytest.MonkeyPatch) -> None:
        for name, value in values.items():
            patcher.setattr(module, name, value)

    return patch


def method(owner: type, name: str, function: Callable[..., Any]) -> Patch:
    return lambda patcher: patcher.setattr(owner, name, function)


def nothing(*_arguments: object, **_options: object) -> None:
    """Do nothing, in place of a rule's method."""


def same_correction(self: TargetTime, num_sequences: int, drafted: float, measured: float) -> None:
    """Correct the times of all widths alike."""
    size = num_sequences.bit_length()
    error = math.log(max(measured, 1e-9) / self.seconds(num_sequences, [drafted])[0])
    logs, seen = self._ratios(num_sequences), self._seen.get(size, np.zeros(7))
    stride = min(max(error, -widths.LONGEST_STRIDE), widths.LONGEST_STRIDE)
    self._logs[size], self._seen[size] = logs + stride * np.maximum(widths.PACE, 1 / (1 + seen)), seen + 1


def unmeasured(self: TargetTime, _curve: object = None) -> None:
    _MADE(self, UNMEASURED)


_MADE, _BEGIN = TargetTime.__init__, DraftController.begin_step
RULES: Mapping[str, Patch] = {
    "all rules": lambda patcher: None,
    "trials": method(Explorer, "buys", lambda *_: False),
    "trials charged for the texts they read": method(Explorer, "owes", nothing),
    "a least gain of 3 %": constants(controller, MIN_GAIN=1e-9),
    "hardness of a request's text": constants(drafting, OWN_WEIGHT=1e9),
    "hardness that fades": constants(drafting, TEXT_MEMORY=1e9),
    "a method's rates that fade": constants(drafting, METHOD_MEMORY=1e9),
    "the share of tokens that are found": method(MethodAcceptance, "observe_found", nothing),
    "step times measured at the start": method(TargetTime, "__init__", unmeasured),
    "step times corrected by steps": method(TargetTime, "observe", nothing),
    "corrections for each width": method(TargetTime, "observe", same_correction),
    "a limit for what one window moves": constants(widths, LONGEST_STRIDE=50.0),
    "drafting times learned": method(DraftTime, "observe", nothing),
    "the time to read texts": method(Estimator, "read_seconds", lambda *_: 0.0),
    "lengths of prompts and answers learned": constants(estimator, LENGTH_PACE=0.0),
    "requests to come counted": method(
        DraftController, "begin_step", lambda self, decoding, _to_come=0: _BEGIN(self, decoding)
    ),
    "longer plans without drafts": constants(controller, PLAIN_PLAN_STEPS=8, IDLE_PLAN_STEPS=8),
    "typical requests' prospects": method(DraftController, "_typical_pays", lambda *_: False),
    "windows without prompts alone": method(Estimator, "disturb", nothing),
}
"""Each rule, and how to take it out."""


class Case(NamedTuple):
    """A simulated load. `options` are those of the server."""

    name: str
    profile: Profile
    num_requests: int
    seconds: float
    options: Mapping[str, Any] = {}
    prompt: int = 500

    def __str__(self) -> str:
        return f"{self.name}, `{self.profile.method}`, {self.num_requests}"

    def rate(self, patcher: pytest.MonkeyPatch, fixed: int | None, seed: int) -> float:
        patcher.setattr(simulated, "PROMPT", self.prompt)
        server = SimulatedServer(
            patcher, self.num_requests, self.profile, fixed=fixed, seed=seed, **self.options
        )
        server.run(self.seconds / 2)
        return server.run(self.seconds)

    @property
    def numbers(self) -> Sequence[int]:
        """The fixed numbers of draft tokens to compare with."""
        most = self.profile.whole or self.profile.max_tokens
        return (0, most) if self.profile.whole else (0, 1, 2, 4, most)


SEEDS = (0, 1, 2)
SECONDS = {1: 2.0, 2: 3.0, 4: 6.0, 16: 4.0, 64: 6.0}


def cases() -> list[Case]:
    found = [Case("text", profile, load, SECONDS[load]) for profile in PROFILES for load in SECONDS]
    for profile in PROFILES:
        for load in (1, 16):
            wrong = {"rate": lambda number, place: 0.05}
            found.append(Case("all wrong", profile, load, 6.0, wrong))
            unlike = {"rate": lambda number, place: 0.95 if number % 2 else 0.1}
            found.append(Case("unlike texts", profile, max(load, 2), 4.0, unlike))
        for load, factor in ((1, 2.5), (16, 0.4)):
            busy = {"calibrated": lambda rows, factor=factor: factor * target_seconds(1, rows)}
            found.append(Case("measured wrongly", profile, load, 4.0, busy))
        found.append(Case("pauses", profile, 4, 4.0, {"outliers": 0.05}))
        turned = {"rate": lambda number, place: 0.95 if number % 1000 < 40 else 0.05}
        found += [Case("texts turned wrong", profile, load, 12.0, turned) for load in (1, 16)]
    for profile in (PROFILES[0], PROFILES[-1]):
        for prompt in (500, 2000):
            found.append(Case(f"12 tokens after {prompt}", profile, 4, 6.0, {"output_tokens": 12}, prompt))
    slow = replace(PROFILES[0], per_read=2e-5)
    found.append(Case("slow to read", slow, 4, 12.0, {"output_tokens": 1000}, 2000))
    vain: dict[str, Any] = {"output_tokens": 1000, "rate": lambda number, place: 0.05}
    found.append(Case("slow to read, all wrong", slow, 16, 18.0, vain))
    return found


def rates_of(run: tuple[str, int]) -> list[list[float]]:
    """Return each case's rates, by a seed: of "auto" without a rule, or with no rule named of all fixed
    numbers, the first without drafts.
    """
    rule, seed = run
    with pytest.MonkeyPatch.context() as patcher:
        if rule:
            RULES[rule](patcher)
        return [
            [case.rate(patcher, fixed, seed) for fixed in ((None,) if rule else case.numbers)]
            for case in cases()
        ]


def table(found: Mapping[str, Sequence[float]], none: Sequence[float], best: Sequence[float]) -> str:
    """Return the table from the rates of all cases."""
    names, whole, rows = [str(case) for case in cases()], found["all rules"], []
    for rule, rates in found.items():
        over_none = [rate / each for rate, each in zip(rates, none, strict=True)]
        over_best = [rate / each for rate, each in zip(rates, best, strict=True)]
        lost, worst = min((rate / each, name) for rate, each, name in zip(rates, whole, names, strict=True))
        brings = statistics.fmean(rate / each for rate, each in zip(rates, whole, strict=True))
        low = sum(each < 0.98 for each in over_none)
        shown = [f"{min(over_none):.2f}", str(low), f"{statistics.fmean(over_best):.3f}"]
        most = f"{lost:.2f} ({worst})" if rates is not whole else "-"
        rows.append([rule, *shown, f"{min(over_best):.2f}", f"{brings:.3f}", most])
    head = ("left out", "worst over none", "below 0.98", "mean over best", "worst", "mean without / with")
    return markdown_table((*head, "costs most"), rows)


def main() -> None:
    runs = [(rule, seed) for rule in ("", *RULES) for seed in SEEDS]
    with multiprocessing.Pool(2) as pool:
        by_run = dict(zip(runs, pool.map(rates_of, runs, chunksize=1), strict=True))

    def means(rule: str) -> list[list[float]]:
        seeds = zip(*(by_run[rule, seed] for seed in SEEDS), strict=True)
        return [[statistics.fmean(rates) for rates in zip(*case, strict=True)] for case in seeds]

    fixed = means("")
    found = {rule: [rate for (rate,) in means(rule)] for rule in RULES}
    print(f"{len(fixed)} cases, means of {len(SEEDS)} seeds")
    print(table(found, [rates[0] for rates in fixed], [max(rates) for rates in fixed]))


if __name__ == "__main__":
    main()
