"""How lines of the log look, in every process of a server: as text, or as JSON.

Knows no settings, and no module that logs.
"""

import json
import logging
import time
from typing import Literal

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


def set_up_logging(level: str, log_format: LogFormat, process: str = "") -> None:
    """To stderr. `process` names it in every line; empty: the engine's, which text need not say."""
    handler = BesideBars()
    if log_format == "json":
        handler.setFormatter(JsonFormatter(process or "engine"))
    else:
        name = f"{process} " if process else ""
        handler.setFormatter(
            logging.Formatter(f"%(asctime)s %(levelname)-7s {name}%(name)s: %(message)s")
        )
    logging.basicConfig(level=level.upper(), handlers=[handler])
