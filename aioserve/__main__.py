"""`python -m aioserve` is the command `aioserve`."""

import sys

from aioserve.cli import main

if __name__ == "__main__":
    sys.exit(main())
