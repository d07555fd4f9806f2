"""Decides where a request's drafts are made: at the place where its decode worker's batch gets the most
tokens a second.

The decode worker chooses in each step how many tokens each request's draft has.
"""

from __future__ import annotations

from router.placement.drafts.interface import DraftDecision, DraftFacts, DraftOption
from router.placement.drafts.prospects import Prospects

MIN_GAIN = 0.05
"""[share] The gain that a change must bring: about twice the uncertainty of a step's time."""
SEEN_GAIN = 0.02
"""[share] The same if both were observed: that is an average of seconds."""


def decide(request: DraftFacts, prospects: Prospects) -> DraftDecision:
    """Return where the request's drafts are to be made. `prospects` are those of the request's class and
    wishes. Never raises, whatever their snapshots contain.
    """
    nowhere = prospects.nowhere(request)
    if prospects.wants_none:
        return DraftDecision(nowhere, (nowhere,), "no drafts are asked for")
    local, elsewhere = prospects.local(request), prospects.elsewhere(request)
    may_stop = prospects.may_stop or (local is None and not elsewhere)
    found = (nowhere if may_stop else None, local, *elsewhere)
    options = tuple(option for option in found if option is not None)
    tried = next((option for option in options if option.place.maker == request.trial), None)
    if tried is not None:
        return DraftDecision(tried, options, "a trial, to see what it brings")
    best, held = max(options, key=lambda option: option.worth), _held(request, options, local)
    if held is not None and best.worth <= held.worth * (1 + _least_gain(held, best)):
        return DraftDecision(held, options, "nothing brings clearly more")
    return DraftDecision(best, options, "it brings the most")


def _held(
    request: DraftFacts, options: tuple[DraftOption, ...], local: DraftOption | None
) -> DraftOption | None:
    """Return the option to keep unless another gains clearly: the others' place, else the request's own,
    else its decode worker.
    """
    now = request.others
    if now is None and request.current is not None:
        now = request.current.maker
    return next((option for option in options if option.place.maker == now), local if now is None else None)


def _least_gain(one: DraftOption, other: DraftOption) -> float:
    return SEEN_GAIN if one.is_seen and other.is_seen else MIN_GAIN
