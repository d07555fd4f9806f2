"""Strangers cannot fill a log."""

from __future__ import annotations

import logging

from messaging import rare_log
from messaging.rare_log import RareLog


def test_one_line_in_a_while_which_counts_the_others(caplog, monkeypatch):
    log = RareLog(logging.getLogger("test"))
    for number in range(1000):
        log.warning("refused %s", number)
    assert [record.getMessage() for record in caplog.records] == ["refused 0"]
    monkeypatch.setattr(rare_log.time, "monotonic", lambda: 1e12)
    log.warning("refused %s", "later")
    log.warning("refused %s", "too soon")
    assert caplog.records[-1].getMessage() == "refused later (and 999 more like it before)"
    assert len(caplog.records) == 2
