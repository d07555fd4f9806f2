"""The account of speculation: totals of what it yields and costs, for the worker's counters (vLLM's names).

It also detects when far fewer drafts of a class of requests are accepted than before. A class is a method and
the origin of its requests' KV, since some origins can leave a drafter without context. The measure is the
share of drafts whose first token is accepted, which does not depend on the drafts' depth.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from protocol.speculation import Source
from speculation.control.estimator import Origin, SpeculatingRequest

logger = logging.getLogger("tandem.speculation")

_LATEST = 200
"""[drafts] The number of drafts that the latest mean averages."""
_RUNNING = 2048
"""[drafts] The number of drafts that the running mean averages."""
_ENOUGH = 256
"""[drafts] A class with fewer drafts raises no alarm."""
_LOG_INTERVAL_S = 60.0

Drafted = Source | Literal["grammar"]
"""The drafter: a method, or the request's grammar."""


@dataclass(slots=True, eq=False)
class _Class:
    """The acceptance of the first tokens of a class's drafts."""

    num_drafts: int = 0
    latest: float = 0.0
    running: float = 0.0
    collapsed: bool = False

    def observe(self, accepted: bool) -> bool:
        """Add a draft; return whether it takes the class below half of its running mean. A class is reported
        once, until it has been back at three quarters.
        """
        self.num_drafts += 1
        self.latest += (accepted - self.latest) / min(self.num_drafts, _LATEST)
        self.running += (accepted - self.running) / min(self.num_drafts, _RUNNING)
        was_collapsed, share = self.collapsed, 0.75 if self.collapsed else 0.5
        self.collapsed = self.num_drafts >= _ENOUGH and self.latest < share * self.running
        return self.collapsed and not was_collapsed


@dataclass(slots=True, eq=False)
class _Totals:
    """The counts of one method. `lengths` counts its drafts by their number of accepted tokens."""

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
    """The counts of one engine. Only the engine's thread writes them; any thread may call `counters`."""

    def __init__(self) -> None:
        self._methods: defaultdict[Drafted, _Totals] = defaultdict(_Totals)
        self._choices: Counter[tuple[Source, int]] = Counter()
        self._steps: Counter[str] = Counter()
        """The number of steps, by whether they verified drafts."""
        self._verify_seconds = 0.0
        self._rare: Counter[str] = Counter()
        self._classes: defaultdict[tuple[Source, Origin], _Class] = defaultdict(_Class)
        self._next_log = 0.0

    def chose(self, method: Source, num_tokens: int) -> None:
        """Record that a request drafts `num_tokens` in each step until the next choice."""
        self._choices[method, num_tokens] += 1

    def stepped(self, seconds: float, verifies: bool) -> None:
        """Record the duration of a step's forward together with the choice of its tokens."""
        self._steps["yes" if verifies else "no"] += 1
        if verifies:
            self._verify_seconds += seconds

    def drafted(self, method: Drafted, seconds: float) -> None:
        self._methods[method].draft_seconds += seconds

    def verified(self, method: Drafted, num_drafted: int, num_accepted: int) -> None:
        """Record a verified draft of a request. Only tokens that became output count as accepted."""
        totals = self._methods[method]
        totals.num_draft_tokens += num_drafted
        totals.lengths[num_accepted] += 1

    def cut(self, method: Source, num_tokens: int) -> None:
        """Record draft tokens that were not verified because the request's grammar forbids them."""
        self._rare[f'spec_decode_cut_tokens_total{{method="{method}"}}'] += num_tokens

    def observed_first(self, method: Source, origin: Origin, accepted: bool) -> None:
        """Record whether a draft's first token was accepted; warn if its class has collapsed."""
        known = self._classes[method, origin]
        if not known.observe(accepted):
            return
        self._rare[f'spec_acceptance_collapsed_total{{method="{method}",origin="{origin}"}}'] += 1
        now = time.monotonic()
        if now >= self._next_log:
            self._next_log = now + _LOG_INTERVAL_S
            logger.warning(
                "%s, prompt %s: the first token of %.0f %% of the drafts is accepted, after %.0f %% so far",
                method,
                origin.replace("_", " "),
                100 * known.latest,
                100 * known.running,
            )

    def lost_draft(self, request_id: str, why: str) -> None:
        """Warn that a request continues without the drafter's state that came with it."""
        self._rare["spec_decode_lost_drafts_total"] += 1
        lost = "request %s: the draft's state that came along is of no use: %s"
        logger.warning(lost, request_id, why, extra={"request_id": request_id})

    def could_not_draft(self, method: Source) -> None:
        """Count a request whose method cannot draft on this host, which the log has told before."""
        self._rare[f'spec_decode_unavailable_total{{method="{method}"}}'] += 1

    def refused_draft(self, why: str) -> None:
        """Count a draft of the deployment's own drafter that cannot be run. Only the first one is logged."""
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


class DraftTurn:
    """A drafter's turn in a step, which begins now, and its duration: on the host, or on the device if the
    host does not wait for it. After a turn that `is_late` the device may still be drafting; the duration may
    be read only after the host waited for something that the device computes later.
    """

    def __init__(
        self,
        method: Source,
        requests: Sequence[SpeculatingRequest],
        rooms: Sequence[int],
        device: torch.device,
    ) -> None:
        self.method, self.requests, self.rooms = method, requests, rooms
        self.is_late = False
        self.began = self._ended = time.perf_counter()
        self._marks: list[torch.cuda.Event] = []
        if device.type != "cpu":
            self._marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            self._marks[0].record()

    def end(self, *, is_late: bool) -> None:
        self._ended = time.perf_counter()
        self.is_late = is_late and bool(self._marks)
        if self.is_late:
            self._marks[1].record()

    @property
    def seconds(self) -> float:
        """Return the duration; on the device from the start of the first launch to the end of the last."""
        if self.is_late:
            return self._marks[0].elapsed_time(self._marks[1]) * 1e-3
        return self._ended - self.began
