"""A scheduling policy for aioserve, found by the name `shortest_first` once it is installed."""
