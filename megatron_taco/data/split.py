"""Which documents are held out for validation."""

import hashlib


def held_out(key: bytes, fraction: float) -> bool:
    """Whether the document with this key belongs to the validation set.

    The first 64 bits of the key's BLAKE2b digest, as a fraction of 2^64, are compared with
    ``fraction``: no state, no order, the same on every machine, and growing ``fraction`` only
    moves documents from training to validation.

    Args:
        key: What identifies the document: its relative path or its content.
        fraction: Expected share of documents held out, 0 to 1.
    """
    digest = hashlib.blake2b(key, digest_size=8).digest()
    return int.from_bytes(digest, "big") < int(fraction * 2**64)
