"""The rows of the running batch, and what each feature keeps of them between steps."""
