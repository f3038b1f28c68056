"""Weights of few bits: the formats of blocks, and how checkpoints in safetensors hold them."""
