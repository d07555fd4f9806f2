"""`--request-timeout` ends a request at every stage and frees all that it held."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.e2e.serving import PAIR, HttpServing

TIMEOUT_S = 1.5
MARGIN_S = 15.0
FROZEN = "STOP:before"
STAGES = {
    "in prefill": {"prefill-0": "slow:0.5"},
    "waiting for its blocks": {"decode-0": f"{FROZEN}:_on_reserve:1"},
    "as its blocks arrive": {"decode-0": f"{FROZEN}:on_transfer:1"},
    "at the manifest": {"decode-0": f"{FROZEN}:_on_handoff:1"},
    "in decode": {"decode-0": "slow:0.3"},
}


@pytest.mark.parametrize("stage", STAGES)
def test_a_timeout_ends_a_request_at_every_stage(folder: Path, stage: str) -> None:
    """Leases, hand-offs and worker deaths all have later deadlines."""
    options = {"request_timeout": TIMEOUT_S, "handoff_timeout": 60.0, "worker_timeout": 60.0}
    with HttpServing(folder, {**PAIR, **STAGES[stage]}, **options) as serving:
        body = {"model": "model", "prompt": [5] * 400, "max_tokens": 24, "ignore_eos": True}
        asked = time.monotonic()
        answer = serving.http.post("/v1/completions", json=body)
        elapsed = time.monotonic() - asked
        assert answer.status_code == 504, answer.text
        assert "longer than 1.5 s" in answer.json()["error"]["message"]
        [choice] = answer.json()["choices"]
        assert choice["finish_reason"] == "error"
        assert TIMEOUT_S <= elapsed < TIMEOUT_S + MARGIN_S
        if FROZEN not in STAGES[stage].get("decode-0", ""):
            serving.wait_empty()
        else:
            serving.wait(lambda: serving.counter("prefill-0", "handoffs_total") == 0)
            serving.wait(lambda: used_blocks(serving, "prefill-0") == 0)


def used_blocks(serving: HttpServing, worker_id: str) -> int:
    state = serving.worker_states()[worker_id]
    return int(state["total_blocks"] - state["free_blocks"] - state["cached_blocks"])
