"""Vocabularies that map tokens to bytes, in both spellings that models use (byte-level and byte fallback)."""

from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as FastTokenizer

END = "<|end|>"


def byte_level() -> FastTokenizer:
    """Return a vocabulary of the 256 bytes, as GPT-2 spells them; token 256 is a control token."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in kept]
    letters = {chr(byte): byte for byte in kept} | {chr(256 + index): byte for index, byte in enumerate(others)}
    fast = FastTokenizer(models.BPE(letters, []))
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens([AddedToken(END, special=True)])
    return fast


def byte_fallback(words: tuple[str, ...] = ()) -> FastTokenizer:
    """Return a vocabulary of the 256 bytes, as SentencePiece spells them, then `words`, with U+2581 for a space."""
    pieces = {f"<0x{byte:02X}>": byte for byte in range(256)}
    pieces |= {word: 256 + index for index, word in enumerate(words)}
    fast = FastTokenizer(models.BPE(pieces, [], byte_fallback=True))
    fast.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    return fast


def llama_style(words: tuple[str, ...]) -> FastTokenizer:
    """Return the vocabulary of `byte_fallback`, with Llama 2's rule that a text loses its leading space."""
    fast = byte_fallback(words)
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    fast.decoder = decoders.Sequence(steps)
    return fast
