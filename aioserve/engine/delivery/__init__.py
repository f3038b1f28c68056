"""From a step's outputs to what each reader gets: text, streams, the lines of logs."""
