"""`python -m aioserve` is the command `aioserve`."""

import sys

from aioserve.support.process import end_at_sigterm, prepare_process, way_out


def main() -> int:
    """Run the command; where a package is missing, say so in a line. Returns the exit code."""
    prepare_process()
    is_server = len(sys.argv) < 2 or sys.argv[1] == "serve" or sys.argv[1].startswith("-")
    if is_server:
        end_at_sigterm()
    try:
        from aioserve.cli.main import main as run
    except ModuleNotFoundError as error:
        print(f"aioserve: error: {way_out(error)}", file=sys.stderr)  # noqa: T201
        return 1
    except KeyboardInterrupt:
        if is_server:  # as SIGTERM
            return 0
        raise
    return run()


if __name__ == "__main__":
    sys.exit(main())
