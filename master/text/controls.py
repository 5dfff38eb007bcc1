"""Control tokens, and encoding in which only text of the chat template can become a control token."""

import re
from collections.abc import Mapping
from functools import cached_property

from tokenizers import AddedToken
from tokenizers import Tokenizer as FastTokenizer

_BRACKETED = re.compile(r"<[|\uff5c].*[|\uff5c]>", re.DOTALL)
_CALLER = b"\x00"


class Controls:
    """Encoder of text with one mark per character: zero for a caller's text, any other value for trusted text.

    The guarantee is about token ids: a control token only ever comes from characters that are all trusted, whatever the
    tokenizer's normalizer, merges and added tokens do.
    """

    def __init__(self, fast: FastTokenizer, template: str | None) -> None:
        """Find the control tokens: special tokens, tokens like `<|...|>`, and markup that `template` contains."""
        self._fast = fast
        self._template = template or ""

    def encode(self, text: str, marks: bytes) -> list[int]:
        """Return the token ids of `text`, which has one mark for each character, without added tokens around it."""
        encoded = self._fast.encode(text, add_special_tokens=False)
        ids = encoded.ids
        suspects = [at for at, token in enumerate(ids) if token in self._spellings]
        if not suspects:
            return list(ids)
        offsets = encoded.offsets
        spans = [self._core(ids[at], text, *offsets[at]) for at in suspects]
        typed = [span for at, span in zip(suspects, spans, strict=True) if self._is_typed(ids[at], text, marks, *span)]
        if not typed:
            return list(ids)
        found, at = list[int](), 0
        for first, end in typed:
            found += self.encode(text[at:first], marks[at:first]) if first > at else []
            found += self.literal(text[first:end])
            at = end
        return found + (self.encode(text[at:], marks[at:]) if at < len(text) else [])

    def literal(self, text: str) -> list[int]:
        """Return the token ids of `text` as plain text, without control tokens, whatever `text` contains."""
        self._fast.encode_special_tokens = True
        try:
            ids = list(self._fast.encode(text, add_special_tokens=False).ids)
        finally:
            self._fast.encode_special_tokens = False
        controls = self._spellings.keys() - {self._unknown}
        if not controls & set(ids):
            return ids
        if len(text) == 1:
            return [token for token in ids if token not in controls]
        return self.literal(text[:1]) + self.literal(text[1:])  # the parts no longer spell the token

    def prompt(self, text: str) -> list[int]:
        """Return the token ids of `text` as plain text, with the tokens that the model expects around a prompt."""
        bare, whole = (list(self._fast.encode("a", add_special_tokens=special).ids) for special in (False, True))
        before = next((at for at in range(len(whole)) if whole[at : at + len(bare)] == bare), 0)
        return whole[:before] + self.encode(text, _CALLER * len(text)) + whole[before + len(bare) :]

    def _core(self, token: int, text: str, first: int, end: int) -> tuple[int, int]:
        """Return the start and end in `text` of a control token's own characters.

        The tokenizer reports `first` and `end`, which may include white space around the token.
        """
        spelled = self._spellings[token]
        at = text.find(spelled, first, end)
        if at >= 0:
            return at, at + len(spelled)
        inner = text[first:end]
        first += len(inner) - len(inner.lstrip())
        return first, first + len(inner.strip())

    def _is_typed(self, token: int, text: str, marks: bytes, first: int, end: int) -> bool:
        """Return True if `text[first:end]` is the control token `token` and a caller wrote any of its characters."""
        if token == self._unknown and text[first:end] != self._spellings[token]:
            return False  # `token` stands for a character that is not in the vocabulary
        return marks.find(_CALLER, first, end) >= 0

    @cached_property
    def _spellings(self) -> Mapping[int, str]:
        """Text of each control token, by the token's id."""
        added: Mapping[int, AddedToken] = self._fast.get_added_tokens_decoder()
        return {number: token.content for number, token in added.items() if self._is_control(token)}

    @cached_property
    def _unknown(self) -> int | None:
        """Id of the token for characters that are not in the vocabulary; None if there is none."""
        named = getattr(self._fast.model, "unk_token", "<unk>")  # Unigram models do not name it
        return self._fast.token_to_id(named) if isinstance(named, str) else None

    def _is_control(self, token: AddedToken) -> bool:
        text = token.content
        if token.special or _BRACKETED.fullmatch(text):
            return True
        return not (text[:1].isalnum() or text[:1].isspace()) and text in self._template
