"""How models write tool calls and reasoning into their text, and how to read that as it comes.

Knows no HTTP and no engine: text goes in, in any pieces; events come out.
"""
