"""What is measured and shown of an engine: metrics, traces, the live feed, hangs, a snapshot."""
