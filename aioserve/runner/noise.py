"""Random numbers that depend on (seed, position, token id) and on nothing else.

A counter-based hash instead of a stream: the number of a token does not depend on the batch, the
row, or what was drawn before. Integers only, so that a GPU kernel can compute the same bits.
"""

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint32]

_GOLDEN = np.uint32(0x9E3779B9)  # 2**32 / golden ratio: keeps small inputs apart


def seed_words(seed: int) -> tuple[int, int]:
    """The low and the high 32 bits of a signed or unsigned 64-bit seed."""
    return seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF


def row_keys(seeds: Words, positions: npt.NDArray[np.int64]) -> Words:
    """Two keys per row, [N, 2], from `seeds` [N, 2] and the positions [N] of the sampled tokens.

    key0 = mix(mix(mix(low + GOLDEN) ^ high) + position); key1 = mix(key0 + GOLDEN)
    """
    key = seeds[:, 0] + _GOLDEN
    key = mix(mix(key) ^ seeds[:, 1]) + positions.astype(np.uint32)
    key0 = mix(key)
    return np.stack([key0, mix(key0 + _GOLDEN)], axis=1)


def hash_tokens(keys: Words, token_ids: Words) -> Words:
    """mix(mix(token_id + key0) ^ key1) for `keys` [N, 2] and `token_ids` [V] or [N, V]: [N, V]."""
    words = token_ids + keys[:, :1]
    return mix(mix(words) ^ keys[:, 1:])


def mix(words: Words) -> Words:
    """A bijective 32-bit mixer, all arithmetic modulo 2**32; changes `words` in place.

    x ^= x >> 16; x *= 0x7feb352d; x ^= x >> 15; x *= 0x846ca68b; x ^= x >> 16
    Source: "lowbias32", C. Wellons, Prospecting for Hash Functions (2018), public domain.
    """
    shifted = np.right_shift(words, 16)
    words ^= shifted
    words *= np.uint32(0x7FEB352D)
    words ^= np.right_shift(words, 15, out=shifted)
    words *= np.uint32(0x846CA68B)
    words ^= np.right_shift(words, 16, out=shifted)
    return words


def uniform(words: Words) -> npt.NDArray[np.float32]:
    """Hash words as numbers in (0, 1): (top 23 bits + 0.5) / 2**23, exact in float32."""
    return ((words >> np.uint32(9)).astype(np.float32) + np.float32(0.5)) * np.float32(2**-23)
