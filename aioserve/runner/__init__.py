"""Whatever computes steps: a model on the CPU or on a card, or nothing but a model of its time."""
