"""Counts what speculation brought and cost, as totals for the worker's counters (vLLM's names, by method)."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

from protocol.speculation import Source

logger = logging.getLogger("tandem.speculation")

Drafted = Source | Literal["grammar"]
"""The drafter: a method, or the request's grammar."""

Origin = Literal["computed", "prefix_hit", "handed_over"]
"""The source of a prompt's KV: all computed here, partly from the prefix cache, or from another worker."""


@dataclass(slots=True, eq=False)
class _Totals:
    """The counts of one method. `lengths` counts its drafts by how many of their tokens were accepted."""

    draft_seconds: float = 0.0
    num_draft_tokens: int = 0
    lengths: Counter[int] = field(default_factory=Counter)

    def counters(self, method: Drafted) -> dict[str, float]:
        label, lengths = f'method="{method}"', self.lengths.copy()
        counters = {f"spec_decode_draft_seconds_total{{{label}}}": self.draft_seconds}
        if lengths:
            counters |= {
                f"spec_decode_num_drafts_total{{{label}}}": lengths.total(),
                f"spec_decode_num_draft_tokens_total{{{label}}}": self.num_draft_tokens,
                f"spec_decode_num_accepted_tokens_total{{{label}}}": sum(
                    length * count for length, count in lengths.items()
                ),
            }
        for position in range(max(lengths, default=0)):
            name = f'spec_decode_num_accepted_tokens_per_pos_total{{{label},position="{position}"}}'
            counters[name] = sum(count for length, count in lengths.items() if length > position)
        return counters


class Account:
    """Written by the engine's thread; `counters` may be called from any."""

    def __init__(self) -> None:
        self._methods: dict[Drafted, _Totals] = {}
        self._choices: Counter[tuple[Source, int]] = Counter()
        self._steps: Counter[str] = Counter()
        """By whether they verified drafts."""
        self._verify_seconds = 0.0
        self._rare: Counter[str] = Counter()

    def chose(self, method: Source, num_tokens: int) -> None:
        """One request was to draft so many tokens in each step, until the next choice."""
        self._choices[method, num_tokens] += 1

    def stepped(self, seconds: float, verifies: bool) -> None:
        """A step's forward with the choice of its tokens took so long."""
        self._steps["yes" if verifies else "no"] += 1
        if verifies:
            self._verify_seconds += seconds

    def drafted(self, method: Drafted, seconds: float) -> None:
        """A batch of drafts was made."""
        self._of(method).draft_seconds += seconds

    def verified(self, method: Drafted, num_drafted: int, num_accepted: int) -> None:
        """One request's draft was verified; only tokens that became output count as accepted."""
        totals = self._of(method)
        totals.num_draft_tokens += num_drafted
        totals.lengths[num_accepted] += 1

    def cut(self, method: Source, num_tokens: int) -> None:
        """Drafted tokens that the request's grammar forbids were not verified."""
        self._rare[f'spec_decode_cut_tokens_total{{method="{method}"}}'] += num_tokens

    def collapsed(self, method: Source, origin: Origin) -> None:
        """The drafts of a class of requests are accepted far less than they used to be."""
        self._rare[f'spec_acceptance_collapsed_total{{method="{method}",origin="{origin}"}}'] += 1

    def lost_draft(self, request_id: str, why: str) -> None:
        """A request goes on without the drafter's state that came with it."""
        self._rare["spec_decode_lost_drafts_total"] += 1
        lost = "request %s: the draft's state that came along is of no use: %s"
        logger.warning(lost, request_id, why, extra={"request_id": request_id})

    def refused_draft(self, why: str) -> None:
        """A drafter of the deployment's own drafted what cannot be run. It is said once."""
        if not self._rare["spec_decode_refused_drafts_total"]:
            logger.warning("drafts of --speculative-config's drafter are dropped: %s", why)
        self._rare["spec_decode_refused_drafts_total"] += 1

    def counters(self) -> dict[str, float]:
        counters: dict[str, float] = dict(self._rare)
        for drafts, count in self._steps.copy().items():
            counters[f'spec_decode_steps_total{{drafts="{drafts}"}}'] = count
        if self._verify_seconds:
            counters["spec_decode_verify_seconds_total"] = self._verify_seconds
        for method, totals in self._methods.copy().items():
            counters |= totals.counters(method)
        for (method, num_tokens), count in self._choices.copy().items():
            counters[f'spec_decode_choices_total{{method="{method}",k="{num_tokens}"}}'] = count
        return counters

    def _of(self, method: Drafted) -> _Totals:
        totals = self._methods.get(method)
        if totals is None:
            totals = self._methods[method] = _Totals()
        return totals
