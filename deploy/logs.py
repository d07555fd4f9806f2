"""Log lines of the launcher's and the routers' processes."""

from __future__ import annotations

import logging
from typing import Any

from protocol.config import ServeConfig
from protocol.logs import log_to_stderr

log = logging.getLogger("tandem")


def set_up_logging(config: ServeConfig, name: str = "") -> None:
    """To stderr, each line with the process' name where there are several of a kind."""
    log_to_stderr(config.log_level, config.log_format, name)
    # Its warnings are lines that any client can cause; they are counted instead.
    logging.getLogger("uvicorn").setLevel(logging.ERROR)


def say(config: ServeConfig, text: str, **fields: Any) -> None:
    """Tell who started the server, on standard output; in a structured log, with `fields`."""
    if config.log_format == "json":
        log.info("%s", text, extra=fields)
    else:
        print(text, flush=True)
