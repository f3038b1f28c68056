"""GPT-2's alphabet: the printable characters by which byte-level vocabularies spell bytes."""

REPLACEMENT = "\ufffd"  # what a decoder shows for bytes that are no character (yet)


def _alphabet() -> dict[str, int]:
    """GPT-2's table of printable stand-ins for the 256 bytes, inverted."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    shifted = {chr(256 + i): byte for i, byte in enumerate(others)}
    return {chr(byte): byte for byte in printable} | shifted


_BYTE_OF_CHAR = _alphabet()


def spelled_bytes(token: str) -> bytes | None:
    """The bytes that a token of a byte-level vocabulary spells; None if it is not spelled so."""
    try:
        return bytes([_BYTE_OF_CHAR[char] for char in token])
    except KeyError:
        return None
