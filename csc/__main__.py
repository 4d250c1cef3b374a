"""`python -m csc` is the `csc` command."""

import sys

from csc.cli import main

if __name__ == "__main__":
    sys.exit(main())
