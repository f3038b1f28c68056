"""The decision log: every call of a scheduler, written, read and made again."""
