"""Tokens as the bytes that they stand for, by the spelling of their vocabulary: they may be parts of characters."""

import json
import re
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

from tokenizers import Tokenizer as FastTokenizer

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_AS_IT_IS = range(0x20, 0x7F)


def speller(fast: FastTokenizer) -> Callable[[int], bytes]:
    """What gives the bytes of each token; none for numbers that are no token.

    Byte-level vocabularies write each byte as a letter; SentencePiece writes blanks as U+2581 and bytes as `<0xE2>`.
    Tokens of others are what they decode to alone.
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
    """A token's bytes as text; where they are none alone as OpenAI's completions write them, `bytes:\\xf0\\x9f`."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(chr(b) if b in _AS_IT_IS and b != ord("\\") else f"\\x{b:02x}" for b in data)


def _steps(decoder: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The steps of a decoder of Hugging Face's tokenizers, as its JSON has them."""
    for step in decoder.get("decoders", ()):
        yield from _steps(step)
    if "type" in decoder:
        yield decoder


def _replaced(steps: list[dict[str, Any]]) -> dict[str, str]:
    """What stands in pieces for other text, above all for blanks."""
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
    """A control token with other letters is spelled as it is."""
    letters = _letters()
    return bytes(letters[one] for one in piece) if all(one in letters for one in piece) else piece.encode()


@cache
def _letters() -> dict[str, int]:
    """GPT-2's letter of each byte (Radford et al. 2019, `bytes_to_unicode`): visible ones are Latin-1's."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(0x100 + index): byte for index, byte in enumerate(others)}
