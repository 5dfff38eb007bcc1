"""The vocabulary of a GGUF file as a `tokenizers` tokenizer.

SentencePiece vocabularies, and byte-level ones whose way of splitting words is known, are converted here in about half
a second; the rest goes through transformers, which takes about ten.
"""

from collections.abc import Iterable, Mapping, Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from tpi.errors import ModelError
from tpi.families.gguf.words import WAYS, splitter
from tpi.sources.gguf import GgufSource

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # token types
_SPACE = "\u2581"  # what SentencePiece writes for a space
_LONGEST = 256  # characters of a SentencePiece piece; by its own default they are no longer than 16


def convert(source: GgufSource) -> Tokenizer:
    """The tokenizer of a GGUF file.

    Raises:
        ModelError: if it cannot be converted.
    """
    kind, pre = source.metadata.get("tokenizer.ggml.model"), source.metadata.get("tokenizer.ggml.pre")
    if not (kind == "llama" or (kind == "gpt2" and pre in WAYS)):
        return _through_transformers(source)
    tokens, kinds = source.array("tokenizer.ggml.tokens"), source.array("tokenizer.ggml.token_type")
    try:
        tokenizer = _sentencepiece(source, tokens, kinds) if kind == "llama" else _byte_level(source, tokens, str(pre))
        added = [(token, kind) for token, kind in zip(tokens, kinds, strict=True) if kind in (_CONTROL, _USER_DEFINED)]
    except Exception as error:  # the library raises plain Exception
        raise ModelError(f"{source.path} has a vocabulary that does not fit together ({error})") from error
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=kind == _CONTROL) for token, kind in added])
    return tokenizer


def _byte_level(source: GgufSource, tokens: Sequence[str], pre: str) -> Tokenizer:
    """Byte-level BPE (GPT-2 and its kin): merges in order of rank."""
    merges = [tuple(merge.split(" ", 1)) for merge in source.array("tokenizer.ggml.merges")]
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre == "llama-bpe"))
    tokenizer.pre_tokenizer = splitter(pre)
    tokenizer.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _sentencepiece(source: GgufSource, tokens: Sequence[str], kinds: Sequence[int]) -> Tokenizer:
    """SentencePiece BPE (Llama 2, Phi-3, Gemma): pieces with scores, bytes for what no piece covers."""
    vocab = {token: index for index, token in enumerate(tokens)}
    unknown = next((token for token, kind in zip(tokens, kinds, strict=True) if kind == _UNKNOWN), None)
    pieces = {
        token: score
        for token, score, kind in zip(tokens, source.array("tokenizer.ggml.scores"), kinds, strict=True)
        if kind not in (_UNKNOWN, _CONTROL)
    }
    model = models.BPE(vocab=vocab, merges=_merges(pieces), unk_token=unknown, fuse_unk=True, byte_fallback=True)
    prefixed = bool(source.metadata.get("tokenizer.ggml.add_space_prefix", True))
    tokenizer = Tokenizer(model)
    spaces = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if prefixed else spaces
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(steps + ([decoders.Strip(" ", 1, 0)] if prefixed else []))
    return tokenizer


def _merges(pieces: Mapping[str, float]) -> list[tuple[str, str]]:
    """Every way to make a piece of two others, the piece of the highest score first.

    Takes time in proportion to the characters of all pieces, times at most `_LONGEST`.

    Raises:
        ValueError: if a piece is longer than that.
    """
    _check_lengths(pieces)
    found = [
        (-score, piece[:cut], piece[cut:])
        for piece, score in pieces.items()
        for cut in range(1, len(piece))
        if piece[:cut] in pieces and piece[cut:] in pieces
    ]
    found.sort(key=lambda merge: merge[0])
    return [(left, right) for _, left, right in found]


def _check_lengths(pieces: Iterable[str]) -> None:
    longest = max(pieces, key=len, default="")
    if len(longest) > _LONGEST:
        raise ValueError(f"the piece {longest[:20]!r}... has {len(longest)} characters, more than {_LONGEST}")


def _through_transformers(source: GgufSource) -> Tokenizer:
    from transformers import AutoTokenizer

    try:
        if "tokenizer.ggml.merges" not in source.metadata:  # transformers makes them, in the square of a piece's length
            _check_lengths(source.array("tokenizer.ggml.tokens"))
        found = AutoTokenizer.from_pretrained(str(source.path.parent), gguf_file=source.path.name)
        return Tokenizer.from_str(found.backend_tokenizer.to_str())
    except Exception as error:  # whatever a conversion may raise
        raise ModelError(f"the tokenizer of {source.path} cannot be converted ({error})") from error
