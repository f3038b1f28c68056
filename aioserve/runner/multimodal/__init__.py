"""Images in the runner: the encoder, the rows that need its outputs, the text backbone."""
