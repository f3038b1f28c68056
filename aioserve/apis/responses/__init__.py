"""OpenAI's Responses API: its wire structs, what it remembers, its routes."""
