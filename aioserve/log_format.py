"""How lines of the log look, in every process of a server, as text or as JSON, and who writes them.

A thread does: a log whose reader stands still holds up no request. Knows no settings, and no module
that logs.
"""

import json
import logging
import time
from typing import Literal

from aioserve.background_writer import Gaps, write_streams_aside
from aioserve.progress import BesideBars

LogFormat = Literal["text", "json"]


class JsonFormatter(logging.Formatter):
    """An object a line: time, level, logger, process, message; and what the line is about, if the
    record has `fields`.
    """

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """One line of the log, as a JSON object."""
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{moment}.{int(record.msecs):03}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "process": self._process,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def set_log_level(level: str) -> None:
    """Set the lowest level that this package logs, in whatever way logging was set up."""
    logging.getLogger("aioserve").setLevel(level.upper())


class _LogGaps(Gaps):
    """Says in the log how many of its lines are missing."""

    def __init__(self, formatter: logging.Formatter) -> None:
        self._formatter = formatter

    def ends(self, num_lines: int, error: OSError) -> bytes:
        """A line in the place of those that are lost."""
        told = f"{num_lines} lines of the log were dropped here: {error.strerror or error}"
        record = logging.LogRecord(__name__, logging.WARNING, "", 0, told, None, None)
        return f"{self._formatter.format(record)}\n".encode()


def set_up_logging(level: str, log_format: LogFormat, process: str = "") -> None:
    """To stderr, by a thread, and so is all else that this process prints: for processes that are a
    server's own. `process` names it in every line; empty: the engine's, which text need not say.
    """
    if log_format == "json":
        formatter: logging.Formatter = JsonFormatter(process or "engine")
    else:
        name = f"{process} " if process else ""
        formatter = logging.Formatter(f"%(asctime)s %(levelname)-7s {name}%(name)s: %(message)s")
    write_streams_aside(_LogGaps(formatter))
    handler = BesideBars()
    handler.setFormatter(formatter)
    logging.basicConfig(level=level.upper(), handlers=[handler])
