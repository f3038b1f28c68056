"""Layers with states or sliding windows: what requests keep beside blocks of the KV cache."""
