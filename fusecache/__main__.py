"""`python -m fusecache` is the command `fusecache`."""

from __future__ import annotations

import sys

from fusecache.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
