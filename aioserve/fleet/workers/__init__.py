"""Processes in front of the engine's: HTTP, templates, tokens and text there, steps here."""
