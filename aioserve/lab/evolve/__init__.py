"""A search for policies: a population on disk, changes with and without a language model."""
