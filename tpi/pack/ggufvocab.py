"""The vocabulary of a GGUF file as a `tokenizers` tokenizer.

Byte-level BPE whose way of splitting words is known is converted here, in half a second; the rest goes through
transformers, which takes about ten.
"""

from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from tpi.errors import ModelError
from tpi.pack.sources.gguf import GgufSource

_CONTROL, _USER_DEFINED = 3, 4  # token types
_LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# how words are split, by `tokenizer.ggml.pre`: a pattern, or None for that of GPT-2
_PATTERNS = {
    "gpt-2": None,
    "smollm": None,
    "llama-bpe": _LETTERS + r"|\p{N}{1,3}" + _REST,
    "qwen2": _LETTERS + r"|\p{N}" + _REST,
}


def convert(source: GgufSource) -> Tokenizer:
    """The tokenizer of a GGUF file.

    Raises:
        ModelError: if it cannot be converted.
    """
    pre = source.metadata.get("tokenizer.ggml.pre")
    if source.metadata.get("tokenizer.ggml.model") == "gpt2" and pre in _PATTERNS:
        return _byte_level(source, str(pre))
    from transformers import AutoTokenizer

    try:
        found = AutoTokenizer.from_pretrained(str(source.path.parent), gguf_file=source.path.name)
        return Tokenizer.from_str(found.backend_tokenizer.to_str())
    except Exception as error:  # whatever a conversion may raise
        raise ModelError(f"the tokenizer of {source.path} cannot be converted ({error})") from error


def _byte_level(source: GgufSource, pre: str) -> Tokenizer:
    tokens, kinds = source.array("tokenizer.ggml.tokens"), source.array("tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ", 1)) for merge in source.array("tokenizer.ggml.merges")]
    vocab = {token: index for index, token in enumerate(tokens)}
    try:
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre == "llama-bpe"))
        added = [
            _added(token, kind) for token, kind in zip(tokens, kinds, strict=True) if kind in (_CONTROL, _USER_DEFINED)
        ]
    except Exception as error:  # the library raises plain Exception
        raise ModelError(f"{source.path} has a vocabulary that does not fit together ({error})") from error
    tokenizer.add_tokens(added)
    tokenizer.pre_tokenizer = _splitter(pre)
    tokenizer.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _added(token: str, kind: int) -> AddedToken:
    return AddedToken(token, normalized=False, special=kind == _CONTROL)


def _splitter(pre: str) -> Any:
    pattern = _PATTERNS[pre]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    if pre == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    if pattern is None:
        return byte_level
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), byte_level])
