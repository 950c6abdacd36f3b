"""`python -m meshbook`: the same as the command `meshbook`."""

from __future__ import annotations

import sys

from meshbook.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
