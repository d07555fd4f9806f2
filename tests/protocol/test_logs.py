"""Log lines, as text and as JSON."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from protocol import logs
from protocol.logs import RareLog, log_to_stderr

ROOT = Path(__file__).parents[2]
log = logging.getLogger("a.logger")


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level


def test_text_is_a_line_with_the_process(capsys: pytest.CaptureFixture[str]) -> None:
    log_to_stderr("info", "text", "decode-0")
    log.debug("not this")
    log.warning("request %s: %d", "abc", 3, extra={"request_id": "abc"})
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(" W decode-0 a.logger: request abc: 3")


def json_lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().err.splitlines()]


def test_json_names_the_subject_of_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    log_to_stderr("debug", "json", "decode-0")
    before = datetime.now(UTC)
    log.debug("request %s:\n%d", "abc", 3, extra={"request_id": "abc", "timing": {"queue_s": 0.5}, "_ray": 1})
    (line,) = json_lines(capsys)
    assert before <= datetime.fromisoformat(line.pop("time")) <= datetime.now(UTC)
    assert line.pop("pid") > 0
    assert line == {
        "level": "debug",
        "process": "decode-0",
        "logger": "a.logger",
        "message": "request abc:\n3",
        "request_id": "abc",
        "timing": {"queue_s": 0.5},
    }


def test_any_text_and_any_object_stay_one_line_of_json(capsys: pytest.CaptureFixture[str]) -> None:
    log_to_stderr("info", "json")
    try:
        raise ValueError("half a \ud83d\nand a line")
    except ValueError as error:
        log.exception("failed: %s", error, extra={"about": {1, 2}})
    (line,) = json_lines(capsys)
    assert line["message"] == "failed: half a \ud83d\nand a line" and line["process"] == "server"
    assert line["exception"].startswith("Traceback ") and line["about"] == "{1, 2}"


def test_repeated_lines_are_limited_and_counted(caplog, monkeypatch):
    log = RareLog(logging.getLogger("test"))
    for number in range(1000):
        log.warning("refused %s", number)
    assert [record.getMessage() for record in caplog.records] == ["refused 0"]
    monkeypatch.setattr(logs.time, "monotonic", lambda: 1e12)
    log.warning("refused %s", "later")
    log.warning("refused %s", "too soon")
    assert caplog.records[-1].getMessage() == "refused later (and 999 more like it before)"
    assert len(caplog.records) == 2


def test_a_message_that_cannot_be_printed_is_logged() -> None:
    """A full disk below standard output, or its reader's end, does not end the server."""
    program = "from protocol.logs import *; log_to_stderr('info', 'text'); say('text', 'Listening')"
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 0, done.stderr
    assert "standard output: [Errno 28] No space left on device: Listening" in done.stderr
