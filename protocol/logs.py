"""The log lines of all processes: text to read, or one JSON object a line to search.

What a line is about goes along as `extra={"request_id": ...}`, which only JSON shows beside the message.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Literal

LogFormat = Literal["text", "json"]

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def log_to_stderr(level: str, log_format: LogFormat, process: str = "") -> None:
    """Each line names the `process`, where there are several of a kind."""
    handler = logging.StreamHandler(sys.stderr)
    if log_format == "json":
        handler.setFormatter(JsonFormatter(process or "server"))
    else:
        name = f"{process} " if process else ""
        handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname).1s {name}%(name)s: %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def _is_standard(name: str) -> bool:
    """Ray adds a name of its own to all records, which begins with an underscore."""
    return name in _STANDARD or name.startswith("_")


class JsonFormatter(logging.Formatter):
    """`time` is in UTC; an `exception` is the traceback. Then comes what the line is about."""

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
