"""Routers that ship, one file each: the file `least_work.py` is the router `least_work`."""
