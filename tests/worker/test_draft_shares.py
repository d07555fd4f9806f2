"""Who gets a draft worker's rows, and what it does when it is too slow."""

from __future__ import annotations

from collections import Counter

from draft_worker.request import DraftRequest, DraftStage
from draft_worker.shares import LONGEST, DraftPace, share_rows
from protocol.draft_messages import DraftKey, DraftOpening
from protocol.requests import EngineRequest
from protocol.sampling import SamplingParams


def request(target: str, number: int, num_drafted: int = 0) -> DraftRequest:
    sampling = SamplingParams(max_tokens=10)
    return DraftRequest(
        EngineRequest(request_id=f"{target}/{number}", prompt_token_ids=[1], sampling=sampling),
        DraftStage.DRAFTING,
        target.encode(),
        DraftKey(str(number), 1),
        DraftOpening(sampling=sampling, num_prompt=1),
        num_drafted=num_drafted,
    )


def test_rows_are_shared_among_targets_and_not_among_requests() -> None:
    large = [request("large", number) for number in range(32)]
    small = [request("small", 0)]
    for num_rows in (2, 8, 33):
        shares = Counter(each.target for each in share_rows([*large, *small], num_rows))
        assert shares == {b"small": 1, b"large": num_rows - 1}
    others = [request(name, number) for name in "abc" for number in range(9)]
    assert Counter(each.target for each in share_rows(others, 12)) == {b"a": 4, b"b": 4, b"c": 4}


def test_the_shortest_drafts_of_a_target_come_first() -> None:
    requests = [request("a", number, num_drafted) for number, num_drafted in enumerate((3, 0, 2, 1))]
    assert [each.num_drafted for each in share_rows(requests, 3)] == [0, 1, 2]


def run(pace: DraftPace, overtaken: int, commits: int = 100, longest: int = 17) -> bool:
    for number in range(commits):
        pace.committed(number < overtaken)
    return pace.adapt(longest)


def test_drafts_are_shortened_before_requests_must_go() -> None:
    pace = DraftPace()
    lengths = []
    while not run(pace, overtaken=80):
        lengths.append(pace.most_ahead)
    assert lengths == [8, 4, 2, 1]
    assert not run(pace, overtaken=30)  # it just keeps up
    assert pace.most_ahead == 1
    for _ in range(10):
        assert not run(pace, overtaken=0)
    assert pace.most_ahead == LONGEST


def test_a_few_commits_decide_nothing() -> None:
    pace = DraftPace()
    assert not run(pace, overtaken=10, commits=10)
    assert pace.most_ahead == LONGEST
