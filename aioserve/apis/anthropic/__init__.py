"""Anthropic's Messages API: its wire structs, its prompts, its answers, its routes."""
