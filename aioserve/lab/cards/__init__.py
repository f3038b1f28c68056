"""Measured cards: step times made of tables of operators, and where such tables come from."""
