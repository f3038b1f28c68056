"""Block hashes are the same in every process, and differ by salt and adapter."""

import subprocess
import sys

PROGRAM = """
from aioserve.kv_cache.block_pool import hash_blocks
from aioserve.request import Request, RequestSpec
from aioserve.params import SamplingParams
for fields in ({}, {"cache_salt": "a"}, {"adapter_id": "a"}):
    request = Request(RequestSpec("r", list(range(9)), SamplingParams(), **fields))
    hash_blocks(request, 2, 4)
    print(*(h.hex() for h in request.block_hashes))
"""


def test_hashes_are_the_same_in_every_process() -> None:
    """Files on disk go by them: a change of these needs another `FORMAT` of the files."""
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    assert result.stdout.splitlines() == EXPECTED


EXPECTED = [
    "d0a17701fb4967c96c83e3cffc7712d1 fadd91593a370bf4b2e09ddf708ab55b",
    "91df1bd229a98cc82c17db8772bc427b 1cb35c769ed37ad7d90e5c4bc6fe43d5",
    "d4b2c8846c1f168fe8cdbb4590e4510c 13f659b7cdf5238ebac36b570957669c",
]
