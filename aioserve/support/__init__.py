"""Helpers that no single room owns: names, files, logs, progress, the command line; the version."""

__version__ = "0.3.0"
