"""Log lines of the launcher's and the routers' processes."""

from __future__ import annotations

import logging
import sys

from protocol.config import ServeConfig


def set_up_logging(config: ServeConfig, name: str = "") -> None:
    """To stderr, each line with the process' name where there are several of a kind."""
    logging.basicConfig(
        level=config.log_level.upper(),
        stream=sys.stderr,
        format=f"%(asctime)s %(levelname).1s {name + ' ' if name else ''}%(name)s: %(message)s",
        force=True,
    )
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
