"""The contract of autoscalers: a toy fleet that is scaled, and rules that hold for any autoscaler.

An author needs `AutoscalerContract`, or `pytest --aioserve-autoscaler mine.py:Mine`.
"""
