"""Images in prompts: which models see, and what becomes of an image on its way to one.

Free of torch, and of Pillow until there is an image. Knows nothing about scheduling, nor how a
model computes.
"""

from aioserve.multimodal.prompt import MultimodalPrompt

__all__ = ["MultimodalPrompt"]
