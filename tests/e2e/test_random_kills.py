"""A real server's processes are killed and frozen at random under load; clients see the same answers."""

from __future__ import annotations

import random
from pathlib import Path

import httpx
import pytest

from bench.kills import Storm
from models.bundled import BUNDLED_MODEL
from tests.deploy.server_process import ServerProcess

pytestmark = [pytest.mark.timeout(480)]

FAULTS = ("killed", "frozen", "killed", "killed")
OPTIONS = ("--decode-replicas", "2", "--dtype", "auto", "--compile", "auto")
OPTIONS += ("--kv-cache-memory-bytes", "64000000", "--worker-timeout", "3")


class SmallStorm(Storm):
    """Draws only the victims at random. A frozen decode worker gets requests until the router notices."""

    def __init__(self, http: httpx.Client) -> None:
        super().__init__(http, replicas=1, rng=random.Random(1))
        self._kinds = iter(FAULTS)

    def _choose(self) -> tuple[str, str, int]:
        kind = next(self._kinds)
        while True:
            _, victim, pid = super()._choose()
            if kind == "killed" or victim.startswith("decode"):
                return kind, victim, pid


def test_random_kills_and_freezes_change_no_answer(tmp_path: Path) -> None:
    with (
        ServerProcess(Path(BUNDLED_MODEL), tmp_path / "log", *OPTIONS) as server,
        httpx.Client(base_url=server.wait_ready().url, timeout=300) as http,
    ):
        every = 1.5
        seen = SmallStorm(http).measure(requests=72, seconds=every * (len(FAULTS) + 1), every=every)
    wanted = {"faults": len(FAULTS), "failed": 0, "failed_without_faults": 0, "different": 0}
    assert seen | wanted == seen
    assert seen["restarted"]
    assert seen["requests_placed_again"] + seen["handoff_redirects"] + seen["requests_parked"] > 0
