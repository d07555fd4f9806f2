"""What speculation brought and cost, as totals for the worker's counters (vLLM's names, by method)."""

from __future__ import annotations

import logging
from collections import defaultdict

from protocol.speculation import Method

logger = logging.getLogger("tandem.speculation")


class Account:
    """Written by the engine's thread; `counters` may be called from any."""

    def __init__(self) -> None:
        self._totals: defaultdict[str, float] = defaultdict(float)

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

    def lost_draft(self, request_id: str, why: str) -> None:
        """A request goes on without the drafter's state that came with it."""
        self._totals["spec_decode_lost_drafts_total"] += 1
        logger.warning("request %s: the draft's state that came along is of no use: %s", request_id, why)

    def counters(self) -> dict[str, float]:
        return dict(self._totals)
