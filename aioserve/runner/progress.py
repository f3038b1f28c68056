"""How bars look while a model is loaded: on a terminal, and for what lasts longer than a moment.

Options of tqdm. In a log file there are none.
"""

from typing import Any

BAR: dict[str, Any] = {
    "delay": 1.0,  # seconds until it shows
    "leave": False,
    "disable": None,  # where stderr is no terminal
}
