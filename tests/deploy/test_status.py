"""What `tandem status` says of the wires."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from deploy.status import make_table

WORKER: dict[str, Any] = {
    "id": "prefill-0",
    "role": "prefill",
    "lifecycle": "ready",
    "num_running": 0,
    "num_waiting": 0,
    "total_blocks": 10,
    "cached_blocks": 0,
    "kv_usage": 0.0,
    "prefix_query_tokens": 0,
    "prefix_hit_tokens": 0,
}
HERE = {"peer": "", "transport": "ucx", "refused": "unavailable", "reason": "no nixl"}
SHM = {"peer": "decode-0", "transport": "shm", "refused": "other_host", "reason": "another host"}
TCP = {"peer": "decode-0", "transport": "tcp", "in_use": True}


@pytest.mark.parametrize(
    ("transports", "pairs", "told"),
    [
        ({}, [], " - "),
        ({"decode-0": "shm"}, [], " decode-0: shm "),
        ({"decode-0": "tcp"}, [SHM, TCP], " decode-0: tcp (shm: another host) "),
        ({"decode-0": "tcp"}, [HERE, SHM, TCP], " decode-0: tcp (shm: another host; ucx: no nixl) "),
    ],
)
def test_the_transport_in_use_and_why_not_a_better_one(
    transports: dict[str, str], pairs: list[dict[str, Any]], told: str
) -> None:
    out = io.StringIO()
    table = make_table(
        "http://localhost", {"workers": [{**WORKER, "transports": transports, "pairs": pairs}]}
    )
    Console(file=out, width=250).print(table)
    (row,) = [line for line in out.getvalue().splitlines() if "prefill-0" in line]
    assert told in row
