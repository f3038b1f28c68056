"""From a checkpoint to a model that computes rows: loading, architectures, layers with state."""
