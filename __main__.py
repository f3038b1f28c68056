"""What `python -m aioserve` finds in a folder that holds a clone called aioserve.

Python takes that folder for the package, which is one level further down, and hides it.
"""

import sys
from pathlib import Path

HERE = Path(__file__).parent

sys.exit(
    f"aioserve: error: `python -m {HERE.name}` finds the clone {HERE}/, not the package in it: "
    f"cd {HERE} first, or run the command `aioserve`, which is installed next to python"
)
