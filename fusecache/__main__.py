"""The command `fusecache`, and `python -m fusecache`: `cli.main`, once it is imported.

Ctrl-C meanwhile ends the process as it ends any other, without the traceback of whatever was being imported.
"""

from __future__ import annotations

import signal
import sys


def run() -> int:
    """Run the command line; the exit code."""
    may_interrupt = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if may_interrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from fusecache.cli.main import main

    if may_interrupt:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return main()


if __name__ == "__main__":
    sys.exit(run())
