"""What speculation brought and cost, as totals for the worker's counters (vLLM's names, by method)."""

from __future__ import annotations

import logging
from collections import defaultdict

from protocol.speculation import Method
from speculation.control.collapse import Origin

logger = logging.getLogger("tandem.speculation")


class Account:
    """Written by the engine's thread; `counters` may be called from any."""

    def __init__(self) -> None:
        self._totals: defaultdict[str, float] = defaultdict(float)
        self._choices: defaultdict[tuple[Method, int], int] = defaultdict(int)

    def chose(self, method: Method, num_tokens: int) -> None:
        """One request was to draft so many tokens in each step, until the next choice."""
        self._choices[method, num_tokens] += 1

    def stepped(self, seconds: float, verifies: bool) -> None:
        """A step's forward with the choice of its tokens took so long."""
        if verifies:
            self._totals['spec_decode_steps_total{drafts="yes"}'] += 1
            self._totals["spec_decode_verify_seconds_total"] += seconds
        else:
            self._totals['spec_decode_steps_total{drafts="no"}'] += 1

    def drafted(self, method: Method, seconds: float) -> None:
        """A batch of drafts was made."""
        self._totals[f'spec_decode_draft_seconds_total{{method="{method}"}}'] += seconds

    def verified(self, method: Method, num_drafted: int, num_accepted: int) -> None:
        """One request's draft was verified; only tokens that became output count as accepted."""
        label = f'{{method="{method}"}}'
        self._totals[f"spec_decode_num_drafts_total{label}"] += 1
        self._totals[f"spec_decode_num_draft_tokens_total{label}"] += num_drafted
        self._totals[f"spec_decode_num_accepted_tokens_total{label}"] += num_accepted
        for position in range(num_accepted):
            name = f'spec_decode_num_accepted_tokens_per_pos_total{{method="{method}",position="{position}"}}'
            self._totals[name] += 1

    def collapsed(self, method: Method, origin: Origin) -> None:
        """The drafts of a class of requests are accepted far less than they used to be."""
        self._totals[f'spec_acceptance_collapsed_total{{method="{method}",origin="{origin}"}}'] += 1

    def lost_draft(self, request_id: str, why: str) -> None:
        """A request goes on without the drafter's state that came with it."""
        self._totals["spec_decode_lost_drafts_total"] += 1
        logger.warning("request %s: the draft's state that came along is of no use: %s", request_id, why)

    def counters(self) -> dict[str, float]:
        choices = {
            f'spec_decode_choices_total{{method="{method}",k="{num_tokens}"}}': float(count)
            for (method, num_tokens), count in self._choices.copy().items()
        }
        return dict(self._totals) | choices
