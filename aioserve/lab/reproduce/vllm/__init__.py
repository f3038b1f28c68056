"""Measured runs of vLLM, predicted: request by request, and by stages of a load."""
