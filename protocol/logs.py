"""Logs of all processes: plain text, or one JSON object per line. Strangers can cause only a few lines.

Fields such as `extra={"request_id": ...}` appear in JSON only.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from datetime import UTC, datetime
from typing import Any, Literal

LogFormat = Literal["text", "json"]

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def log_to_stderr(level: str, log_format: LogFormat, process: str = "") -> None:
    """Log to stderr. Each line names the `process`, if given."""
    handler = logging.StreamHandler(sys.stderr)
    if log_format == "json":
        handler.setFormatter(JsonFormatter(process or "server"))
    else:
        name = f"{process} " if process else ""
        handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname).1s {name}%(name)s: %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # Any client can cause uvicorn's warnings; they are counted instead.
    logging.getLogger("uvicorn").setLevel(logging.ERROR)


def say(log_format: LogFormat, text: str, **fields: Any) -> None:
    """Print a message for the user on standard output, or log it: with `fields` if logs are JSON, or if it
    cannot be printed.
    """
    if log_format == "json":
        logging.getLogger("tandem").info("%s", text, extra=fields)
        return
    try:
        print(text, flush=True)
    except OSError as error:  # a full disk, or a pipe that nobody reads any more
        logging.getLogger("tandem").warning("standard output: %s: %s", error, text)


def _is_standard(name: str) -> bool:
    """Return whether a log record's attribute is standard, or Ray's, rather than a field of ours."""
    return name in _STANDARD or name.startswith("_")


class JsonFormatter(logging.Formatter):
    """A formatter of records as JSON: `time` in UTC, `exception` with the traceback, the extra fields."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="microseconds"),
            "level": record.levelname.lower(),
            "process": self._process,
            "pid": record.process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        fields |= {name: value for name, value in vars(record).items() if not _is_standard(name)}
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, default=str)


INTERVAL_S = 10.0


class RareLog:
    """A logger of at most one warning per `INTERVAL_S`, with the number of suppressed ones. Thread-safe."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._lock = threading.Lock()
        self._due = 0.0
        self._kept_back = 0

    def warning(self, text: str, *arguments: object) -> None:
        with self._lock:
            if time.monotonic() < self._due:
                self._kept_back += 1
                return
            self._due = time.monotonic() + INTERVAL_S
            others, self._kept_back = self._kept_back, 0
        more = f" (and {others} more like it before)" if others else ""
        self._logger.warning(text + more, *arguments)
