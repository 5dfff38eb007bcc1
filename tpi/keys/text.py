"""Public keys as text that people read and type: base32 in groups of four. Each machine has its own key.

Keys are those of CurveZMQ (Curve25519), 32 bytes.
"""

import base64
import binascii

from tpi.errors import UsageError

KEY_BYTES = 32
_GROUP = 4
_SHORT_GROUPS = 4  # 80 bits: enough to tell known keys apart, not to trust one
_CHARACTERS = 52  # length of a whole key


def key_text(key: bytes) -> str:
    """Return a whole key as text, for example `mfzw-izlo-...`: 13 groups of four characters."""
    text = base64.b32encode(key).decode().rstrip("=").lower()
    return "-".join(text[at : at + _GROUP] for at in range(0, len(text), _GROUP))


def short_key(key: bytes) -> str:
    """Return the first four groups of a key, by which it can be recognised."""
    return "-".join(key_text(key).split("-")[:_SHORT_GROUPS])


def parse_key(text: str) -> bytes:
    """Return the key that `key_text` wrote. Grouping and capitals do not matter.

    Raises:
        UsageError: if `text` is not a whole key.
    """
    letters = text.strip().replace("-", "").replace(" ", "").upper()
    try:
        if len(letters) == _CHARACTERS:
            key = base64.b32decode(letters + "=" * (-len(letters) % 8))
            if key_text(key).replace("-", "").upper() == letters:
                return key
    except (binascii.Error, ValueError):
        pass
    raise UsageError(f"{text!r} is not a whole key; copy all 13 groups that tpi keys show prints on that machine")
