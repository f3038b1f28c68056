"""What every policy decided once on three loads, kept: a change inside the scheduler changes none.

Decisions, not bytes: a line of text a step. `python -m tests.golden` writes them anew, where that
is what a change is for.
"""
