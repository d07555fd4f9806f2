"""The parts of a start of `tandem serve`, without Ray."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from deploy.serve import announcement
from protocol.config import ServeConfig


class Started:
    """Stands for the routers once all workers are there."""

    def start_ups(self) -> dict[str, Mapping[str, str]]:
        return {"decode-0": {"device": "cpu, bfloat16", "forward": "native"}}


@pytest.mark.parametrize("url", ["http://127.0.0.1:8000", "https://[::1]:8443"])
def test_the_last_line_names_the_api_and_the_playground(url: str) -> None:
    last = announcement(ServeConfig(), Started(), url).splitlines()[-1]  # type: ignore[arg-type]
    assert last.startswith(f"Listening on {url} ") and f" {url}/," in last
