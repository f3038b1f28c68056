"""The command `search`: the highest rate within an SLO, and the options that suit a workload."""
