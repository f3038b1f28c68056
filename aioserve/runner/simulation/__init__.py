"""A runner that computes nothing and takes the time that a profile predicts."""
