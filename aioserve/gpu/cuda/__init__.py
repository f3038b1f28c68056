"""Steps on a device that computes asynchronously: planned, staged and launched ahead.

`executor` is the heart: plan, one copy to the device, launch, one copy back. Everything but
`cuda_device`, `flashinfer_attention` and `graphs` runs, and is tested, without a card.
"""
