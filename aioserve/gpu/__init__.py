"""Steps on graphics cards: CUDA, and one model on several ranks."""
