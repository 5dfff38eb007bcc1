"""Conversion of a GGUF file's vocabulary to a `Tokenizer`.

The kinds are SentencePiece (`llama`: scored pieces; `gemma4`: pieces and merges) and byte-level BPE (`gpt2`).
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from tpi.errors import ModelError
from tpi.families.gguf.words import WORDS, WordRules
from tpi.sources.gguf import GgufSource

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6  # token types
_PIECES = ("llama", "gemma4")  # kinds of vocabularies whose tokens are text, not bytes
_SPACE = "\u2581"  # stands for a space in SentencePiece
# Settings that change how text is split, with their neutral values. Other values are not supported.
_NEUTRAL = {
    "add_sep_token": False,
    "escape_whitespaces": True,
    "normalizer.lowercase": False,
    "normalizer.strip_accents": False,
    "precompiled_charsmap": [],
    "remove_extra_whitespaces": False,
    "treat_whitespace_as_suffix": False,
}
_ONE_TOKENIZER = ("falcon", "opt")  # architectures all of whose models have one tokenizer
_LONGEST = 256  # limit in characters of a SentencePiece piece; SentencePiece's own default limit is 16


def convert(source: GgufSource) -> Tokenizer:
    """Return the tokenizer of a GGUF file.

    Raises:
        ModelError: if the vocabulary is not supported (see `check_vocabulary`), or is inconsistent.
    """
    words = check_vocabulary(source)
    tokens = source.array("tokenizer.ggml.tokens")
    kinds = source.array("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    try:
        _check_tokens(tokens)
        tokenizer = _byte_level(source, tokens, words) if words else _sentencepiece(source, tokens, kinds)
        added = [(token, kind) for token, kind in zip(tokens, kinds, strict=True) if kind in (_CONTROL, _USER_DEFINED)]
    except Exception as error:  # the library raises plain Exception
        raise ModelError(f"{source.path} has a vocabulary that does not fit together ({error})") from error
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=kind == _CONTROL) for token, kind in added])
    return tokenizer


def check_vocabulary(source: GgufSource) -> WordRules | None:
    """Return the rules by which a byte-level vocabulary splits text into words, or None for SentencePiece.

    Only the metadata of the file is read.

    Raises:
        ModelError: if the kind of vocabulary, its way of splitting text, or a setting is not supported.
    """
    kind, pre = (source.metadata.get(f"tokenizer.ggml.{key}") for key in ("model", "pre"))
    architecture = source.metadata.get("general.architecture")
    if pre is None and source.powerinfer and architecture in _ONE_TOKENIZER:
        pre = architecture  # PowerInfer's converter omits the name
    if kind not in ("gpt2", *_PIECES):
        raise _refused(source, "model", kind, "; gpt2, llama and gemma4 are supported")
    for key, neutral in _NEUTRAL.items():
        value = source.metadata.get(f"tokenizer.ggml.{key}", neutral)
        if value != neutral:
            raise _refused(source, key, value, ", which is not supported")
    if kind in _PIECES:
        return None
    words = WORDS.get(pre) if isinstance(pre, str) else None
    if words is None:
        way = "which says how text is split into words"
        raise _refused(source, "pre", pre, f": {way}, and this way is not known" if pre is not None else f", {way}")
    return words


def _refused(source: GgufSource, key: str, value: object, why: str) -> ModelError:
    found = f"has no tokenizer.ggml.{key}" if value is None else f"has a tokenizer.ggml.{key} of {value!r:.80}"
    return ModelError(f"{source.path} {found}{why}; convert the model again, or use its Hugging Face directory")


def _check_tokens(tokens: Sequence[str]) -> None:
    if len(set(tokens)) < len(tokens):
        twice = next(token for token, count in Counter(tokens).items() if count > 1)
        raise ValueError(f"the token {twice[:80]!r} is listed twice")


def _byte_level(source: GgufSource, tokens: Sequence[str], words: WordRules) -> Tokenizer:
    """Return a byte-level BPE tokenizer, as GPT-2 has one. Its merges are in order of rank."""
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=_merges(source), ignore_merges=words.tokens_first))
    tokenizer.pre_tokenizer = words.splitter()
    tokenizer.decoder = decoders.ByteLevel()
    if words.nfc:
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _sentencepiece(source: GgufSource, tokens: Sequence[str], kinds: Sequence[int]) -> Tokenizer:
    """Return a SentencePiece BPE tokenizer (Llama 2, Phi-3, Gemma): pieces, and bytes for other characters.

    `kinds` has the type of each token (`_NORMAL`, ...).
    """
    vocab = {token: index for index, token in enumerate(tokens)}
    unknown = next((token for token, kind in zip(tokens, kinds, strict=True) if kind == _UNKNOWN), None)
    scored = source.metadata["tokenizer.ggml.model"] == "llama"
    merges = _scored_merges(_pieces(source, tokens, kinds)) if scored else _merges(source)
    model = models.BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    prefixed = bool(source.metadata.get("tokenizer.ggml.add_space_prefix", True))
    tokenizer = Tokenizer(model)
    spaces = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if prefixed else spaces
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(steps + ([decoders.Strip(" ", 1, 0)] if prefixed else []))
    return tokenizer


def _merges(source: GgufSource) -> list[tuple[str, str]]:
    """Return the merges that the file lists, in order of rank.

    Raises:
        ValueError: if the file lists no merges.
    """
    parts = (merge.partition(" ") for merge in source.array("tokenizer.ggml.merges"))
    if not (found := [(left, right) for left, _, right in parts]):
        raise ValueError("it has no merges")
    return found


def _pieces(source: GgufSource, tokens: Sequence[str], kinds: Sequence[int]) -> dict[str, float]:
    """Return the score of each piece that a text may be divided into. Control tokens are not such pieces."""
    scores = source.array("tokenizer.ggml.scores")
    return {
        token: score
        for token, score, kind in zip(tokens, scores, kinds, strict=True)
        if kind not in (_UNKNOWN, _CONTROL, _BYTE)
    }


def _scored_merges(pieces: Mapping[str, float]) -> list[tuple[str, str]]:
    """Return all pairs of pieces that together form a piece, ordered by the score of that piece, highest first.

    The time is proportional to the total length of all pieces, times at most `_LONGEST`.

    Raises:
        ValueError: if a piece is longer than `_LONGEST` characters.
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
