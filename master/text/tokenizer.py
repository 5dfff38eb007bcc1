"""Text to token ids and back: the model's own tokenizer and chat template, taken from its pack. Master only."""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer as FastTokenizer

from master.text.spelling import speller
from master.text.values import mapped, texts_of, unused
from tpi.errors import ModelError
from tpi.pack.reader import Pack

if TYPE_CHECKING:
    from master.text.templates.template import ChatTemplate

Message = Mapping[str, Any]  # {"role": ..., "content": ...}, and what else the template knows

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # what an unfinished character decodes to
_HELD_TOKENS = 16  # more than an unfinished character has


class Tokenizer:
    """Encodes prompts and conversations, and decodes token by token."""

    def __init__(self, fast: FastTokenizer, info: Mapping[str, Any], model: str = "this model") -> None:
        """`info`: bos_token, eos_token, bos_id, eos_ids, add_bos and chat_template of the pack's manifest."""
        self._fast = fast
        self._model = model
        self.info = info
        self.eos_ids = frozenset(info.get("eos_ids") or ())
        self.chat_template: str | None = info.get("chat_template")

    @classmethod
    def load(cls, pack: Pack) -> "Tokenizer":
        """The tokenizer that was packed with the model; raises ModelError if there is none."""
        return cls(FastTokenizer.from_file(str(pack.tokenizer_file)), pack.tokenizer_info, str(pack.path))

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Token ids of `text`; with `special`, the tokens that the model wants around a prompt are added.

        Control tokens that are spelled out in `text` become what they name.
        """
        return list(self._fast.encode(text, add_special_tokens=special).ids)

    def encode_chat(
        self,
        messages: Sequence[Message],
        replay: Mapping[int, Sequence[int]] = MappingProxyType({}),
        **names: Any,
    ) -> list[int]:
        """Token ids of a conversation, ready for the assistant's answer.

        Control tokens come from the template alone: what a message spells out stays text. A model without a chat
        template gets the contents as they are, joined by newlines. Of messages named in `replay`, by their index, the
        very tokens stand in the place of their content. `names` are what else the template is given, such as tools.

        Raises:
            ModelError: if the template fails, or refuses the messages.
        """
        if self.chat_template is None:
            return self.encode("\n".join(message["content"] for message in messages))
        mark, again = unused(texts_of((messages, names)), 2)
        asked = [
            {"role": message["role"], "content": f"{mark}{again}{index}{mark}"}
            if index in replay
            else mapped(message, lambda text: self._mark(text, mark))
            for index, message in enumerate(messages)
        ]
        rendered = self.render(asked, **mapped(names, lambda text: self._mark(text, mark)))
        ids: list[int] = []
        for index, piece in enumerate(rendered.split(mark)):
            if index % 2 and piece.startswith(again):
                ids += replay[int(piece[1:])]
            else:
                ids += self._literal(piece) if index % 2 else self.encode(piece, special=False)
        return ids

    def render(self, messages: Sequence[Message], **names: Any) -> str:
        """The conversation through the model's chat template, with the opening of the assistant's turn.

        Raises:
            ModelError: as `encode_chat`.
        """
        special = {name: self.info.get(name) or "" for name in ("bos_token", "eos_token")}
        return self._template.render(messages, **{**names, **special})

    def control(self, text: str) -> int | None:
        """The control token that is spelled like `text`, if there is one; tokens that are shown as text are none."""
        token = self._fast.token_to_id(text)
        return token if token is not None and self._controls.fullmatch(text) else None

    def spelling(self, tokens: Sequence[int]) -> str:
        """How tokens are written, control tokens included; what is no whole character is shown as U+FFFD."""
        return b"".join(map(self.raw, tokens)).decode(errors="replace")

    @property
    def definition(self) -> str:
        """The tokenizer as Hugging Face's JSON."""
        return str(self._fast.to_str())

    def stream(self, spelled: Collection[int] = ()) -> "TokenStream":
        """A decoder for one answer, which shows the control tokens `spelled` as they are spelled, and no others."""
        return TokenStream(self._fast, {token: str(self._fast.id_to_token(token)) for token in spelled})

    @cached_property
    def raw(self) -> Callable[[int], bytes]:
        """Gives the bytes that a token stands for, control tokens included: perhaps no whole character."""
        return speller(self._fast)

    @cached_property
    def _template(self) -> "ChatTemplate":
        from master.text.templates.template import ChatTemplate  # jinja2 is not loaded for prompts that need none

        if self.chat_template is None:
            raise ModelError(f"{self._model} has no chat template; use tpi run --raw")
        return ChatTemplate(self.chat_template, self._model)

    @cached_property
    def _controls(self) -> re.Pattern[str]:
        """Finds the spelling of any control token."""
        tokens = [token.content for token in self._fast.get_added_tokens_decoder().values() if token.special]
        longest_first = sorted(filter(None, tokens), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def _mark(self, content: str, mark: str) -> str:
        """`content` with a mark before and after each control token that it spells out."""
        return self._controls.sub(lambda found: f"{mark}{found[0]}{mark}", content)

    def _literal(self, text: str) -> list[int]:
        """Token ids of `text` as text, even where it spells a control token."""
        self._fast.encode_special_tokens = True
        try:
            return self.encode(text, special=False)
        finally:
            self._fast.encode_special_tokens = False


class TokenStream:
    """Decodes one answer token by token, and shows no part of a UTF-8 character before `flush`.

    New text is what a window of the last tokens decodes to beyond what it did before: decoders look at neighbours.
    """

    def __init__(self, fast: FastTokenizer, spelled: Mapping[int, str] = MappingProxyType({})) -> None:
        """`spelled`: control tokens that are shown, with how they are spelled."""
        self._fast = fast
        self._spelled = spelled
        self._shown: list[int] = []  # the tokens of the text that was returned last
        self._held: list[int] = []  # the tokens since

    def push(self, token: int) -> str:
        """The text that `token` completes, empty while a character is unfinished."""
        if token in self._spelled:
            return self.flush() + self._spelled[token]
        self._held.append(token)
        text = self._new_text()
        if text.endswith(_REPLACEMENT) and len(self._held) <= _HELD_TOKENS:
            return ""
        if text:
            self._shown, self._held = self._held, []
        return text

    @property
    def held(self) -> str:
        """What would be shown of an unfinished character if nothing came of it."""
        return self._new_text() if self._held else ""

    def flush(self) -> str:
        """What is still held at the end of an answer; an unfinished character is shown as U+FFFD."""
        text = self._new_text()
        self._shown, self._held = self._held, []
        return text

    def _new_text(self) -> str:
        before, both = self._decode(self._shown), self._decode(self._shown + self._held)
        return both[len(before) :] if both.startswith(before) else self._decode(self._held)

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(self._fast.decode(tokens, skip_special_tokens=True)) if tokens else ""
