"""Decides where a request's drafts are made, and how many at most: what brings its batch the most tokens.

The decode worker chooses below that ceiling in each step, request by request. So where its own drafts were
expected to pay they are only ruled out once they clearly lose: until then it knows better, and learns.
"""

from __future__ import annotations

from router.placement.drafts.interface import DraftDecision, DraftFacts, DraftOption
from router.placement.drafts.prospects import Prospects

MIN_GAIN = 0.05
"""[share] That another drafter must bring: about twice what is uncertain of a step's time."""
DOUBT = 0.1
"""[share] That a decode worker's own drafts are expected to lose before a request that has them stops."""


def decide(request: DraftFacts, prospects: Prospects) -> DraftDecision:
    """`prospects` are those of the request's class and wishes. Never raises, whatever their snapshots say."""
    nowhere = prospects.nowhere(request)
    if prospects.why_none:
        return DraftDecision(nowhere, (nowhere,), prospects.why_none)
    local, elsewhere = prospects.local(request), prospects.elsewhere(request)
    may_stop = prospects.may_stop or (local is None and not elsewhere)
    options = [option for option in (nowhere if may_stop else None, local, *elsewhere) if option is not None]
    own, why = _own(request, nowhere if may_stop else None, local)
    best = max(elsewhere, key=lambda option: _standing(request, option), default=None)
    if best is None or (own is not None and _outdoes(request, own, nowhere, best)):
        assert own is not None
        return DraftDecision(own, tuple(options), why)
    return DraftDecision(best, tuple(options), f"worker {best.place.at} brings more than this one alone")


def _own(
    request: DraftFacts, nowhere: DraftOption | None, local: DraftOption | None
) -> tuple[DraftOption | None, str]:
    """What the decode worker does without draft workers, and why."""
    if local is None or nowhere is None:
        return (
            local or nowhere,
            "the client or the deployment says so" if local else "no worker has the draft",
        )
    drafts = request.current is not None and request.current.method is not None
    least = nowhere.worth * (1 - DOUBT) if drafts else nowhere.worth
    ratio = (
        f"{local.worth / nowhere.worth:.3g} times plain steps" if nowhere.worth > 0 else "nothing is known"
    )
    if local.worth >= least:
        return local, f"own drafts: {ratio}"
    if request.explores:
        return local, f"own drafts, to see whether they pay by now: {ratio}"
    return nowhere, f"own drafts are ruled out: {ratio}"


def _outdoes(request: DraftFacts, own: DraftOption, nowhere: DraftOption, other: DraftOption) -> bool:
    """Own drafts bring no less than plain steps: the decode worker makes none where they don't pay."""
    worth = max(own.worth, nowhere.worth)
    return _standing(request, own._replace(worth=worth)) >= _standing(request, other)


def _standing(request: DraftFacts, option: DraftOption) -> float:
    """Who drafts now is only left for a clear gain; a request that begins is with its decode worker."""
    at = request.current.at if request.current is not None else None
    return option.worth * (1 + MIN_GAIN) if at == option.place.at else option.worth
