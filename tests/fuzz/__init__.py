"""Input at random for all that reads what others wrote: `make fuzz`.

A case is refused with an error of the project's own, in a line, or accepted. It raises nothing
else, ends in time, unpickles nothing and runs no code that came with it.
"""
