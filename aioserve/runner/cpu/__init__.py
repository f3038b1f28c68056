"""Steps on the CPU: one after another, on a thread of their own.

`executor` is the heart: batch, forward pass, sample. What has the same name in `cuda` is the same
part there.
"""
