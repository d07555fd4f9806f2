"""A record of one placement: the options compared, the expected cost, and the observed times."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from router.placement.drafts.history import DraftHistory
from router.placement.interface import Option, Placement, RequestFacts


@dataclass(eq=False, slots=True)
class PlacementDecision:
    """A placement that was made. Observed seconds count from the placement on; None until they are known."""

    request_id: str
    facts: RequestFacts
    placement: Placement
    drafts: DraftHistory
    at: float = field(default_factory=time.time)
    placed_at: float = field(default_factory=time.monotonic)
    observed_ttft_s: float | None = None
    observed_tpot_s: float | None = None

    def as_json(self) -> dict[str, Any]:
        placement, facts = self.placement, self.facts
        return {
            "request_id": self.request_id,
            "at": self.at,
            "num_tokens": facts.num_tokens,
            "expected_output_tokens": facts.output_tokens,
            "cached_tokens": dict(facts.cached_tokens),
            "session": facts.session or None,
            "asked_to_split": facts.split,
            "chosen": _option(Option(placement.workers, placement.prefix, placement.predicted), facts),
            "missing": placement.missing,
            "alternatives": [
                _option(option, facts)
                for option in placement.options
                if (option.workers, option.prefix) != (placement.workers, placement.prefix)
            ],
            "drafts": self.drafts.as_json(),
            "observed": {"ttft_s": self.observed_ttft_s, "tpot_s": self.observed_tpot_s},
        }


def _option(option: Option, facts: RequestFacts) -> dict[str, Any]:
    shown: dict[str, Any] = {"workers": dict(option.workers), "prefix": option.prefix}
    if option.predicted is not None:
        shown["predicted"] = {
            "ttft_s": option.predicted.ttft_s,
            "tpot_s": option.predicted.tpot_s(facts.output_tokens),
            "cost_s": option.predicted.total_s,
            "parts": option.predicted._asdict(),
        }
    return shown
