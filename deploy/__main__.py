"""Where `tandem` begins, also as `python -m deploy`."""

import os
import signal
import sys


def main() -> None:
    """Run the command line. Until a command runs, Ctrl-C ends the process without a traceback."""
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    from deploy.cli import app

    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        app(prog_name="tandem")
    except KeyboardInterrupt:  # while the commands were being made: those that run see to it themselves
        sys.exit(130)


if __name__ == "__main__":
    main()
