"""The entry point of `tandem`, also for `python -m deploy`."""

import os
import signal


def main() -> None:
    """Run the command line. Until a command runs, Ctrl-C ends the process without a traceback."""
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    from deploy.cli import app

    app(prog_name="tandem")


if __name__ == "__main__":
    main()
