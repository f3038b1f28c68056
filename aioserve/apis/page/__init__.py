"""The page that shows the scheduler at work: its files, and the stream that it draws."""
