"""Published results that the lab runs again, one file each: `python -m aioserve reproduce NAME`."""
