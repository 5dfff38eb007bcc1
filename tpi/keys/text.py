"""Public keys as people read and type them: base32 in groups of four. A key is its machine's name that nobody else has.

Keys are those of CurveZMQ (Curve25519), 32 bytes.
"""

import base64
import binascii

from tpi.errors import UsageError

KEY_BYTES = 32
_GROUP = 4
_SHORT_GROUPS = 4  # 80 bits: to tell keys apart that are known, never to trust one
_CHARACTERS = 52  # of a whole key


def key_text(key: bytes) -> str:
    """All of a key, for example `mfzw-izlo-...`: 13 groups of four."""
    text = base64.b32encode(key).decode().rstrip("=").lower()
    return "-".join(text[at : at + _GROUP] for at in range(0, len(text), _GROUP))


def short_key(key: bytes) -> str:
    """The first groups of a key, to recognise it by."""
    return "-".join(key_text(key).split("-")[:_SHORT_GROUPS])


def parse_key(text: str) -> bytes:
    """The key that `key_text` wrote; groups and capitals do not matter.

    Raises:
        UsageError: if it is no whole key.
    """
    letters = text.strip().replace("-", "").replace(" ", "").upper()
    try:
        if len(letters) == _CHARACTERS:
            key = base64.b32decode(letters + "=" * (-len(letters) % 8))
            if key_text(key).replace("-", "").upper() == letters:
                return key
    except (binascii.Error, ValueError):
        pass
    raise UsageError(f"{text!r} is not a whole key; copy all 13 groups of what tpi keys show prints on that machine")
