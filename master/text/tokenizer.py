"""Text to token ids and back: the model's own tokenizer and chat template, taken from its pack. Master only."""

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any

from tokenizers import Tokenizer as FastTokenizer

from master.text.controls import Controls
from master.text.spelling import speller
from master.text.templates.fitting import Turn, fitted
from master.text.templates.template import FIRST_ANSWER, ChatTemplate, Rendering, TemplateRefusal
from master.text.templates.traits import Traits, joined
from master.text.values import texts_of
from tpi.errors import ModelError
from tpi.pack.reader import Pack

Message = Mapping[str, Any]  # {"role": ..., "content": ...}, and other fields that the template knows
_AFTER = " "  # shows whether the template trims contents
_PRIVATE = range(0x100000, 0x10FFFE)
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # the decoder's output for an unfinished character
_ANSWER = re.compile(b"\x02+")
_MIXED = "It's 3.14159 of 1,024;  x\u0302 = f(y)\n\n\tif not x: return [\u00fc\u4f60\u597d\U0001f642]\r\n"
"""A text of many kinds of characters, by which tokenizers are compared."""
_HELD_TOKENS = 16  # the most tokens to hold while their text ends in U+FFFD, which may be part of the text
_UNFINISHED = 3  # most tokens of an unfinished character, which lacks at least the last of its up to 4 bytes


def unused(texts: Iterable[str]) -> str:
    """Return a character of a private-use plane that does not occur in `texts`."""
    used = set("".join(texts))
    return next(character for character in map(chr, _PRIVATE) if character not in used)


def with_end(message: Message, end: str) -> dict[str, Any]:
    """Return the message with `end` and a blank after its text."""
    content = message.get("content") or ""
    if isinstance(content, list):  # a list of parts
        *others, last = content
        return {**message, "content": [*others, {**last, "text": f"{last['text']}{end}{_AFTER}"}]}
    return {**message, "content": f"{content}{end}{_AFTER}"}


def up_to_end(rendered: str, text: str, end: str, model: str) -> int:
    """Return the position of `end` in `rendered`, less the white space that ends `text` if the template trims it.

    Raises:
        TemplateRefusal: if the template does not show the last message.
    """
    before, found, after = rendered.rpartition(end)
    if not found:
        raise TemplateRefusal(model, "it does not show the end of the last message, so it cannot be continued")
    white = text[len(text.rstrip()) :]
    trimmed = white and not after.startswith(_AFTER) and before.endswith(white)
    return len(before) - (len(white) if trimmed else 0)


class Tokenizer:
    """A model's tokenizer and chat template: it encodes prompts and conversations, and decodes token by token."""

    def __init__(self, fast: FastTokenizer, info: Mapping[str, Any], model: str = "this model") -> None:
        """Create a tokenizer.

        `info` has these fields of the manifest: bos_token, eos_token, bos_id, eos_ids, add_bos, chat_template and
        tool_template. `model` is the name in errors.
        """
        self._fast = fast
        self._model = model
        self.info = info
        self.eos_ids = frozenset(info.get("eos_ids") or ())
        self.chat_template: str | None = info.get("chat_template")
        self.tool_template: str | None = info.get("tool_template") or self.chat_template

    @classmethod
    def load(cls, pack: Pack) -> "Tokenizer":
        """Return the tokenizer that was packed with the model.

        Raises:
            ModelError: if the pack has no tokenizer.
        """
        return cls(FastTokenizer.from_file(str(pack.tokenizer_file)), pack.tokenizer_info, str(pack.path))

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Return the token ids of `text`; with `special`, add the tokens that the model expects around a prompt.

        Control tokens that are written out in `text` become control tokens.
        """
        return list(self._fast.encode(text, add_special_tokens=special).ids)

    def encode_chat(
        self,
        messages: Sequence[Message],
        replay: Mapping[int, Sequence[int]] = MappingProxyType({}),
        names: Mapping[str, Any] = MappingProxyType({}),
        tools: Sequence[Mapping[str, Any]] = (),
        continued: bool = False,
    ) -> list[int]:
        """Return the token ids of a conversation, ready for the assistant's answer.

        Control tokens come only from the template: a message or a value of `names` that contains their text stays text,
        whatever the template does with it. Without a chat template the contents are joined by newlines, as text. A
        message of a kind that the template does not show becomes part of another turn.

        Args:
            replay: tokens to use in place of the contents of messages, by their index.
            names: further values for the template.
            tools: each has a name, and perhaps a description and parameters.
            continued: end with the text of the last message, the assistant's, without the end of the turn.

        Raises:
            ModelError: if the template fails, or refuses the messages.
        """
        turns, told = fitted(messages, tools, self.traits(bool(tools)))
        if self.chat_template is None:
            return self._controls.prompt("\n".join(turn.content for turn in turns))
        rendering, answers = self._rendering(turns, {**names, **told}, replay, continued)
        ids, at, marks = list[int](), 0, rendering.marks
        for found in _ANSWER.finditer(marks):
            ids += self._controls.encode(rendering.text[at : found.start()], marks[at : found.start()])
            ids += answers[ord(rendering.text[found.start()]) - FIRST_ANSWER]
            at = found.end()
        return ids + self._controls.encode(rendering.text[at:], marks[at:])

    def render(self, messages: Sequence[Message], names: Mapping[str, Any] = MappingProxyType({})) -> str:
        """Return the conversation as the chat template writes it, with the opening of the assistant's turn.

        If `tools` are among `names`, use the model's template for tools, if it has one.

        Raises:
            ModelError: if the template fails, or refuses the messages.
        """
        return self._template_for(names).render(messages, names).text

    def traits(self, with_tools: bool = False) -> Traits:
        """Return the traits of the model's chat template, or of its template for tools."""
        return self._tool_traits if with_tools and self.tool_template != self.chat_template else self._traits

    def names_read(self, with_tools: bool = False) -> frozenset[str]:
        """Return the names that the chat template reads; `with_tools`: the names that the template for tools reads.

        Raises:
            ModelError: if the template is invalid.
        """
        if self.chat_template is None:
            return frozenset()
        return (self._tool_template if with_tools else self._template).names_read

    def encode_text(self, text: str) -> list[int]:
        """Return the token ids of a plain-text prompt. Control tokens written out in `text` stay text."""
        return self._controls.prompt(text)

    def start(self) -> None:
        """Start the process that renders the chat template, so that it loads in the background."""
        if self.chat_template is not None:
            self._template.start()

    def close(self) -> None:
        """Stop the process that renders the chat template. The next rendering starts it again."""
        if self.chat_template is not None:
            self._template.close()
            self._tool_template.close()

    def control(self, text: str) -> int | None:
        """Return the control token with this text, or None; tokens that are shown as text do not count."""
        token = self._fast.token_to_id(text)
        added = self._fast.get_added_tokens_decoder().get(token) if token is not None else None
        return token if added is not None and added.special else None

    def controls_in(self, text: str) -> frozenset[int]:
        """Return the control tokens whose text is in `text`; tokens that are shown as text do not count."""
        added = self._fast.get_added_tokens_decoder().items()
        return frozenset(number for number, token in added if token.special and token.content in text)

    def spelling(self, tokens: Sequence[int]) -> str:
        """Return the text of `tokens` with control tokens; incomplete characters become U+FFFD."""
        return b"".join(map(self.raw, tokens)).decode(errors="replace")

    def agrees_with(self, other: "Tokenizer") -> bool:
        """Return True if both give the same ids to the same text. One tokenizer may have more tokens than the other."""
        mine, its = (
            sorted(each._fast.get_vocab(with_added_tokens=True).items(), key=_number) for each in (self, other)
        )
        alike = all(one == another for one, another in zip(mine, its, strict=False))
        return alike and self.encode(_MIXED, special=False) == other.encode(_MIXED, special=False)

    @property
    def definition(self) -> str:
        """The tokenizer as JSON, in the format of Hugging Face's `tokenizers`."""
        return str(self._fast.to_str())

    def stream(self, spelled: Collection[int] = ()) -> "TokenStream":
        """Return a decoder for one answer that writes out the control tokens `spelled` and omits all others."""
        return TokenStream(self._fast, {token: str(self._fast.id_to_token(token)) for token in spelled})

    @cached_property
    def raw(self) -> Callable[[int], bytes]:
        """A function that returns the bytes of a token id, which may be a part of a character."""
        return speller(self._fast)

    def _rendering(
        self, turns: Sequence[Turn], names: Mapping[str, Any], replay: Mapping[int, Sequence[int]], continued: bool
    ) -> tuple[Rendering, dict[int, Sequence[int]]]:
        messages, end = [dict(turn.message) for turn in turns], ""
        places = [(place, turn.index) for place, turn in enumerate(turns) if turn.index is not None]
        answers = {place: replay[index] for place, index in places if index in replay}
        if continued:
            answers.pop(len(turns) - 1, None)
            end = unused(texts_of((messages, dict(names))))
            messages[-1], names = with_end(messages[-1], end), {**names, "add_generation_prompt": False}
        found = self._with_answers(messages, names, answers.keys()) or self._template_for(names).render(messages, names)
        if not continued:
            return found, answers
        size = up_to_end(found.text, turns[-1].content, end, self._model)
        return Rendering(found.text[:size], found.marks[:size]), answers

    def _template_for(self, names: Mapping[str, Any]) -> ChatTemplate:
        return self._tool_template if names.get("tools") else self._template

    def _with_answers(
        self, messages: Sequence[Message], names: Mapping[str, Any], answers: Collection[int]
    ) -> Rendering | None:
        """Return the rendered conversation, in which one character stands for each earlier answer in `answers`.

        `answers` are indices of `messages`. Return None if the template leaves out or changes one of these answers.
        """
        if not answers:
            return None
        try:
            rendering = self._template_for(names).render(messages, names, answers)
        except TemplateRefusal:  # the template examines its own turns
            return None
        return rendering if sorted(_answers(rendering)) == sorted(answers) else None

    @cached_property
    def _template(self) -> ChatTemplate:
        if self.chat_template is None:
            raise ModelError(f"{self._model} has no chat template; use tpi run --raw")
        return ChatTemplate(self.chat_template, self._model, self._special)

    @cached_property
    def _tool_template(self) -> ChatTemplate:
        if self.tool_template is None or self.tool_template == self.chat_template:
            return self._template
        return ChatTemplate(self.tool_template, self._model, self._special)

    @property
    def _special(self) -> dict[str, str]:
        return {name: self.info.get(name) or "" for name in ("bos_token", "eos_token")}

    @cached_property
    def _traits(self) -> Traits:
        if self.chat_template is None:
            return Traits(lambda messages, names: joined(messages))
        return Traits(lambda messages, names: self._template.render(messages, names).text)

    @cached_property
    def _tool_traits(self) -> Traits:
        return Traits(lambda messages, names: self._tool_template.render(messages, names).text)

    @cached_property
    def _controls(self) -> Controls:
        return Controls(self._fast, "".join({self.chat_template or "", self.tool_template or ""}))


def _number(token: tuple[str, int]) -> int:
    return token[1]


def _answers(rendering: Rendering) -> list[int]:
    """Return, for each character in `rendering` that stands for an earlier answer, the index of its message.

    The index is -1 where the template has changed the text that stands for the answer.
    """
    marks, text = rendering.marks, rendering.text
    return [ord(text[found.start()]) - FIRST_ANSWER if len(found[0]) == 1 else -1 for found in _ANSWER.finditer(marks)]


class TokenStream:
    """A decoder of one answer, token by token. It returns no incomplete UTF-8 character before `flush`.

    Decoders look at neighbouring tokens. Therefore a window of the last tokens is decoded, and the text beyond the
    previous result is new.
    """

    def __init__(self, fast: FastTokenizer, spelled: Mapping[int, str] = MappingProxyType({})) -> None:
        """Create a decoder that writes the control tokens `spelled`, by id, as the given texts."""
        self._fast = fast
        self._spelled = spelled
        self._shown: list[int] = []  # the tokens of the text that was returned last
        self._held: list[int] = []  # the tokens that came after `_shown`

    def push(self, token: int) -> str:
        """Return the text that `token` completes; empty while a character is unfinished."""
        if token in self._spelled:
            return self.flush() + self._spelled[token]
        self._held.append(token)
        text, cut = self._new_text(self._held), len(self._held)
        if text.endswith(_REPLACEMENT):
            if len(self._held) <= _HELD_TOKENS:
                return ""
            text, cut = self._finished_text()
        if text:
            self._shown, self._held = self._held[:cut], self._held[cut:]
        return text

    @property
    def held(self) -> str:
        """The text of an unfinished character, as it would be shown if nothing followed."""
        return self._new_text(self._held) if self._held else ""

    def flush(self) -> str:
        """Return the text still held at the end of an answer; an unfinished character becomes U+FFFD."""
        text = self._new_text(self._held)
        self._shown, self._held = self._held, []
        return text

    def _new_text(self, held: list[int]) -> str:
        """Return the text of `held`, tokens that follow `_shown`."""
        before, both = self._decode(self._shown), self._decode(self._shown + held)
        return both[len(before) :] if both.startswith(before) else self._decode(held)

    def _finished_text(self) -> tuple[str, int]:
        """Return the text of the held tokens without an unfinished character at their end, and their number.

        An unfinished character has at most `_UNFINISHED` tokens. Some decoders write each byte of a run of bytes as
        U+FFFD while its last character is unfinished. So the cut with the fewest of these is between two characters.
        """
        cuts = range(len(self._held), len(self._held) - _UNFINISHED - 1, -1)
        texts = [(self._new_text(self._held[:cut]), cut) for cut in cuts]
        return min(texts, key=lambda each: each[0].count(_REPLACEMENT))

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(self._fast.decode(tokens, skip_special_tokens=True)) if tokens else ""
