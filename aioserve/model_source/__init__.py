"""Models as they lie on disk: what can be asked of one, whichever its format.

A module for each format behind the same face, and one that fetches models by name. Knows nothing of
settings beyond what reading needs, and nothing of requests.
"""
