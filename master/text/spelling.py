"""The bytes of each token, which may be a part of a character."""

import json
import re
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

from tokenizers import Tokenizer as FastTokenizer

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_AS_IT_IS = range(0x20, 0x7F)


def speller(fast: FastTokenizer) -> Callable[[int], bytes]:
    """Return a function that returns the bytes of a token; empty for a number that is not a token.

    Byte-level vocabularies write each byte as a letter. SentencePiece writes blanks as U+2581 and bytes as `<0xE2>`.
    Tokens of other vocabularies are decoded one by one.
    """
    steps = list(_steps(json.loads(fast.decoder.__getstate__()) if fast.decoder is not None else {}))
    kinds = {step["type"] for step in steps}
    if "ByteLevel" in kinds:
        return lambda token: _of_letters(fast.id_to_token(token) or "")
    if kinds & {"ByteFallback", "Metaspace"}:
        blanks = _replaced(steps)
        return lambda token: _of_pieces(fast.id_to_token(token) or "", blanks)
    return lambda token: str(fast.decode([token], skip_special_tokens=False)).encode()


def written(data: bytes) -> str:
    r"""Return a token's bytes as text; invalid UTF-8 becomes `bytes:\xf0\x9f`, as in OpenAI's completions."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(chr(b) if b in _AS_IT_IS and b != ord("\\") else f"\\x{b:02x}" for b in data)


def _steps(decoder: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for step in decoder.get("decoders", ()):
        yield from _steps(step)
    if "type" in decoder:
        yield decoder


def _replaced(steps: list[dict[str, Any]]) -> dict[str, str]:
    """Return the texts that replace parts of a token's piece, for example a blank for U+2581."""
    patterns = {
        step["pattern"]["String"]: step["content"]
        for step in steps
        if step["type"] == "Replace" and "String" in step["pattern"]
    }
    return patterns | {step["replacement"]: " " for step in steps if step["type"] == "Metaspace"}


def _of_pieces(piece: str, replaced: dict[str, str]) -> bytes:
    if byte := _BYTE.fullmatch(piece):
        return bytes([int(byte[1], 16)])
    for old, new in replaced.items():
        piece = piece.replace(old, new)
    return piece.encode()


def _of_letters(piece: str) -> bytes:
    """Return the bytes of a piece; a control token with other letters is encoded as UTF-8."""
    letters = _letters()
    return bytes(letters[one] for one in piece) if all(one in letters for one in piece) else piece.encode()


@cache
def _letters() -> dict[str, int]:
    """Return the byte for each letter of GPT-2's vocabulary (Radford et al. 2019, `bytes_to_unicode`)."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(0x100 + index): byte for index, byte in enumerate(others)}
