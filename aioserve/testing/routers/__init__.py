"""The contract of routers: a toy fleet on a clock of its own, and rules that hold for any router.

An author needs `RouterContract`, or `pytest --aioserve-router mine.py:Mine`.
"""
