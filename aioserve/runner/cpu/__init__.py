"""Steps on the CPU: one after another, on a thread of their own."""
