"""What operators change in an engine that serves: its state, its adapters, its policy."""
