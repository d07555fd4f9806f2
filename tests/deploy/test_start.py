"""The parts of a start of `tandem serve`, without Ray."""

from __future__ import annotations

import shlex
import threading
import time
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

import pytest

import deploy.launcher
from deploy.config import load_config
from deploy.launcher import announcement
from deploy.processes import Patience
from protocol.config import ServeConfig
from protocol.speculation import DEFAULT_SPECULATION, SpeculativeConfig
from router.reading.prepared import GenerationDefaults


class Started:
    """Stands in for the routers once all workers run."""

    def __init__(self, speculation: str = "suffix") -> None:
        self._start_up = {"device": "cpu, bfloat16", "forward": "native", "speculation": speculation}

    def start_ups(self) -> dict[str, Mapping[str, str]]:
        return {"decode-0": self._start_up}


STARTED: Any = Started()


@pytest.mark.parametrize("url", ["http://127.0.0.1:8000", "https://[::1]:8443"])
def test_the_last_line_names_the_api_and_the_playground(url: str) -> None:
    last = announcement(ServeConfig(), STARTED, url, GenerationDefaults()).splitlines()[-1]
    assert last.startswith(f"Listening on {url} ") and f" {url}/," in last


@pytest.mark.parametrize(
    "speculation", [DEFAULT_SPECULATION, None, SpeculativeConfig(method="ngram")], ids=str
)
def test_the_start_says_how_to_turn_off_the_default_speculation(
    speculation: SpeculativeConfig | None,
) -> None:
    config = ServeConfig(speculative_config=speculation)
    said = announcement(config, STARTED, "http://a", GenerationDefaults()).splitlines()
    lines = [line for line in said if line.startswith("Speculates by suffix")]
    assert len(lines) == (speculation == DEFAULT_SPECULATION)
    for line in lines:
        command = line[line.index("(off: ") + 6 : -1]
        option, value = shlex.split(command)
        assert load_config({option[2:].replace("-", "_"): value}, {}).speculative_config is None


def test_the_start_promises_no_drafts_where_no_worker_makes_them() -> None:
    config, started = ServeConfig(speculative_config=DEFAULT_SPECULATION), Started("none (not exact)")
    assert "peculates" not in announcement(config, cast(Any, started), "http://a", GenerationDefaults())


@pytest.mark.parametrize("variables", [{"enable_thinking": False, "mood": "calm"}, {}, None], ids=str)
def test_the_start_shows_the_chat_templates_variables(variables: dict[str, Any] | None) -> None:
    config = ServeConfig(default_chat_template_kwargs=variables)
    said = announcement(config, STARTED, "http://a", GenerationDefaults()).splitlines()
    shown = [line.partition("(--default-chat-template-kwargs): ")[2] for line in said if "kwargs" in line]
    assert shown == (['{"enable_thinking": false, "mood": "calm"}'] if variables else [])


class StartingLauncher:
    """A launcher that waits for Ray without interruption."""

    cluster = SimpleNamespace(has_died=False, remove_files=lambda: None)

    def stop(self) -> None:
        """Do nothing, since this launcher cannot stop."""

    def is_alive(self) -> bool:
        return True

    def join(self, timeout: float) -> None:
        time.sleep(timeout)


def test_a_start_is_ended_without_waiting_for_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher, killed = StartingLauncher(), threading.Event()
    monkeypatch.setattr(deploy.launcher, "LAUNCHER_GRACE_S", 1000.0)
    monkeypatch.setattr(deploy.launcher, "kill_descendants", killed.set)
    monkeypatch.setattr(deploy.launcher, "end_descendants", lambda grace_s: None)
    patience = Patience(ServeConfig())
    ending = threading.Thread(target=deploy.launcher._end, args=(launcher, patience, False), daemon=True)
    ending.start()
    ending.join(30)
    assert killed.is_set() and not ending.is_alive()
