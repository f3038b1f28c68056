"""Ollama's API, which many desktop programs look for: /api/chat, /api/generate, /api/tags."""
