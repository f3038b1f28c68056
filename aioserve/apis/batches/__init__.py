"""Files and batches, as OpenAI has them: requests that run while online requests leave time."""
