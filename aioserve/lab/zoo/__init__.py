"""The zoo: published policies on standard workloads, and where another one stands among them."""
