"""Where `tandem` begins, also as `python -m deploy`."""

import os
import signal


def main() -> None:
    """Run the command line. While it is being imported, Ctrl-C ends the process without a traceback."""
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    from deploy.cli import app

    signal.signal(signal.SIGINT, signal.default_int_handler)
    app(prog_name="tandem")


if __name__ == "__main__":
    main()
