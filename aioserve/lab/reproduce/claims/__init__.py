"""Published results that the lab runs again: `python -m aioserve reproduce NAME`."""
