"""Who stands between engine and scheduler and watches, and what is read from its notes.

Decides nothing. Imports the scheduler, and the features of a step; nothing of the engine.
"""
