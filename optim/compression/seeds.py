"""Seeds and ids derived from what all know, or only one peer."""

import hashlib


def digest(text: str) -> str:
    """32 characters that stand for a text."""
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def number(text: str) -> int:
    """A seed of 63 bits."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
