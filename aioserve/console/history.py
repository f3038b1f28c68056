"""What was typed in earlier sessions, for the arrows: a file that its owner alone can read.

Knows readline and the file. Knows nothing of what is typed.
"""

import os
from pathlib import Path

MAX_LINES = 1000


def history_file() -> Path:
    """Where it lies: `aioserve/chat_history` in `XDG_STATE_HOME`, or in `~/.local/state`."""
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(state).expanduser() / "aioserve" / "chat_history"


class History:
    """Of one session: recall it before the first line is read, and keep it after the last one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._num_recalled = 0

    def recall(self) -> str | None:
        """Have the arrows offer the lines of the file, if there is one. Returns why that cannot
        be, in words; None if all is well, and where Python has no readline.
        """
        try:
            import readline
        except ImportError:
            return None
        readline.set_history_length(MAX_LINES)
        try:
            readline.read_history_file(self._path)
        except FileNotFoundError:
            pass
        except (OSError, UnicodeError) as error:
            return f"earlier lines cannot be read from {self._path}: {error}"
        self._num_recalled = readline.get_current_history_length()
        return None

    def keep(self) -> str | None:
        """Add the lines of this session to the file, which keeps the last `MAX_LINES`. Returns as
        `recall` does.
        """
        try:
            import readline
        except ImportError:
            return None
        path, num_new = self._path, readline.get_current_history_length() - self._num_recalled
        if num_new <= 0:
            return None
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            # Made before readline writes, which would let all users read it.
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))
            if hasattr(readline, "append_history_file"):  # another session may have written
                readline.append_history_file(num_new, path)
            else:
                readline.write_history_file(path)
            path.chmod(0o600)  # it may be an older one, or a new one in its place
        except OSError as error:
            return f"what was typed cannot be kept in {path}: {error.strerror or error}"
        return None
