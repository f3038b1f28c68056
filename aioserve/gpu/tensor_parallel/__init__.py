"""One model on several processes, its ranks, each with a share of the weights of every layer.

All ranks run the same steps on their share and add up, twice in a layer, what they have made of it.
Knows neither side of the runner: which process computes how is known there.
"""
