"""Images and videos in prompts: which models see, and what becomes of either on its way to one.

Importing it loads neither torch nor Pillow. Knows nothing about scheduling, nor how a
model computes.
"""

from aioserve.engine.prompt import MultimodalPrompt, Video

__all__ = ["MultimodalPrompt", "Video"]
