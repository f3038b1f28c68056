"""Helpers that no single room owns: names, files, logs, progress, the command line."""
