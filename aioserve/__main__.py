"""`python -m aioserve` is the command `aioserve`."""

import sys

from aioserve.missing import way_out


def main() -> int:
    """Run the command; where a package is missing, say so in a line. Returns the exit code."""
    try:
        from aioserve.cli import main as run
    except ModuleNotFoundError as error:
        print(f"aioserve: error: {way_out(error)}", file=sys.stderr)  # noqa: T201
        return 1
    return run()


if __name__ == "__main__":
    sys.exit(main())
