"""One configuration on one workload, in virtual time or live. Judges nothing."""
