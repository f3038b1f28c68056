"""Autoscalers that ship, one file each: the file `queue_tokens.py` is `queue_tokens`."""
