"""A request's record of its drafts."""

from __future__ import annotations

from router.placement.decision import DraftCounts, DraftHistory, DraftPeriod
from router.placement.drafts import NOWHERE, DraftDecision, DraftOption, DraftPlace

PLAIN = DraftOption(NOWHERE, rate=100.0, worth=100.0, tokens_per_step=1.0)
REMOTE = DraftOption(
    DraftPlace("draft_model", "draft-0"),
    rate=300.0,
    worth=250.0,
    tokens_per_step=2.5,
    max_tokens=8,
    correction=0.9,
)


def period(option: DraftOption, reason: str, began: DraftCounts, ended: DraftCounts) -> DraftPeriod:
    begun = DraftPeriod(DraftDecision(option, (PLAIN, REMOTE), reason), "decode-0", None, 0, began)
    begun.ended = ended
    return begun


def test_each_period_has_its_own_counts_and_the_latest_what_was_compared():
    history = DraftHistory()
    assert history.as_json() is None and history.current is None and history.plan is None
    middle = DraftCounts(10, 10, 0, 0)
    history.periods.append(period(PLAIN, "first", DraftCounts(), middle))
    assert history.current is None and history.plan is None, "it has ended"
    history.periods.append(period(REMOTE, "then", middle, DraftCounts(14, 20, 12, 6)))
    history.num_replans += 1
    nowhere = {"where": "none", "worker": None, "method": None, "max_tokens": 0}
    elsewhere = {"where": "remote", "worker": "draft-0", "method": "draft_model", "max_tokens": 8}
    counts = ["predicted_tokens_per_step", "steps", "tokens", "drafted_tokens", "accepted_tokens"]
    predicted = ["tokens_per_s", "tokens_per_s_with_catch_up", "tokens_per_step", "seen_to_predicted"]
    assert history.as_json() == {
        "replans": 1,
        "periods": [
            nowhere | dict(zip(counts, [1.0, 10, 10, 0, 0], strict=True)),
            elsewhere | dict(zip(counts, [2.5, 4, 10, 12, 6], strict=True)),
        ],
        "chosen": elsewhere | {"predicted": dict(zip(predicted, [300.0, 250.0, 2.5, 0.9], strict=True))},
        "alternatives": [
            nowhere | {"predicted": dict(zip(predicted, [100.0, 100.0, 1.0, 1.0], strict=True))}
        ],
        "reason": "then",
    }
