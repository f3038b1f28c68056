"""The matrix of features: every pair run beside random arrivals, aborts and preemptions."""
