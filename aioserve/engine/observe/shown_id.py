"""What an onlooker is told in place of the id of a request.

A client that has the id may end the request, or open what it has answered.
"""

import re
import secrets
from hashlib import blake2b

# Ids that the server, its page or the engine has made end in 128 random bits. The first 32 find the
# line of the log and leave 96 that a reader would have to guess.
_MADE = re.compile(
    r"((?:chatcmpl-|cmpl-|embd-|msg_|page-|req-|resp_)[0-9a-f]{8})[0-9a-f]{24}((?:-[0-9]+)*)"
)

_KEY = secrets.token_bytes(16)  # of this process: an id cannot be found by trying out many


def shown_id(request_id: str) -> str:
    """A short name for it: the same for the same id, as long as the process lives."""
    made = _MADE.fullmatch(request_id)
    if made is not None:
        return made[1] + made[2]
    text = request_id.encode(errors="surrogatepass")
    return "own-" + blake2b(text, key=_KEY, digest_size=5).hexdigest()
