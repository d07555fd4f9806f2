"""Shares the draft worker's time: targets share the rows, and drafts are shortened before any is refused."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from itertools import zip_longest

from draft_worker.request import DraftRequest
from protocol.speculation import MAX_TREE_NODES

LONGEST = 2 * MAX_TREE_NODES + 1
TOO_LATE, IN_TIME = 0.5, 0.1
"""Shares of the commits that overtake the drafts. Above the first the worker has too much to do, below the
second it can do more.
"""
_LEAST_COMMITS = 16
"""The number of commits from which the share is known."""


def share_rows(requests: Iterable[DraftRequest], num_rows: int) -> list[DraftRequest]:
    """Return the requests that get the next step's rows. Targets take turns, one request each; a target's
    requests with the fewest drafted tokens come first, because their tokens are the likeliest to be used.

    This is deficit round robin with a quantum of one row: every row costs the same, so that no deficit is
    left.
    """
    by_target: dict[bytes, list[DraftRequest]] = defaultdict(list)
    for request in requests:
        by_target[request.target].append(request)
    for of_target in by_target.values():
        of_target.sort(key=lambda request: request.num_drafted)
    rounds = zip_longest(*by_target.values())
    return [request for each in rounds for request in each if request is not None][:num_rows]


class DraftPace:
    """Sets how far drafts may run ahead, from how often the targets overtake them."""

    def __init__(self) -> None:
        self.most_ahead = LONGEST
        self._num_commits = 0
        self._num_overtaken = 0

    def committed(self, overtaken: bool) -> None:
        """Count a commit of a target. `overtaken` means that it exceeds the drafted tokens, though the
        target wanted more drafts.
        """
        self._num_commits += 1
        self._num_overtaken += overtaken

    def adapt(self, longest: int) -> bool:
        """Adjust the distance and return whether to refuse requests. `longest` is how far drafts run ahead
        at present at most.
        """
        if self._num_commits < _LEAST_COMMITS:
            return False
        share = self._num_overtaken / self._num_commits
        self._num_commits = self._num_overtaken = 0
        if share < IN_TIME:
            self.most_ahead = min(2 * self.most_ahead, LONGEST)
        elif share > TOO_LATE:
            if self.most_ahead == 1:
                return True
            self.most_ahead = max(min(longest, self.most_ahead) // 2, 1)
        return False
