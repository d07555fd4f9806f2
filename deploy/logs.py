"""Log output of the launcher and the routers."""

from __future__ import annotations

import logging
from typing import Any

from protocol.config import ServeConfig
from protocol.logs import log_to_stderr

log = logging.getLogger("tandem")


def set_up_logging(config: ServeConfig, name: str = "") -> None:
    """Log to stderr. If there are several processes of a kind, each line has the process' name."""
    log_to_stderr(config.log_level, config.log_format, name)
    # Any client can cause uvicorn's warnings; they are counted instead.
    logging.getLogger("uvicorn").setLevel(logging.ERROR)


def say(config: ServeConfig, text: str, **fields: Any) -> None:
    """Print a message for the user on standard output, or log it with `fields` if logs are structured."""
    if config.log_format == "json":
        log.info("%s", text, extra=fields)
    else:
        print(text, flush=True)
