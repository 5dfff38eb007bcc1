"""Text to token ids and back: the model's own tokenizer and chat template, taken from its pack. Master only."""

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer as FastTokenizer
from tokenizers.decoders import DecodeStream

from tpi.errors import ModelError
from tpi.pack.reader import Pack

Message = Mapping[str, str]  # {"role": ..., "content": ...}


class Tokenizer:
    """Encodes prompts, renders chat templates in a sandbox, and decodes token by token."""

    def __init__(self, fast: FastTokenizer, info: Mapping[str, Any]) -> None:
        """`info`: bos_token, eos_token, bos_id, eos_ids, add_bos and chat_template of the pack's manifest."""
        self._fast = fast
        self.info = info
        self.eos_ids = frozenset(info.get("eos_ids") or ())
        self.chat_template: str | None = info.get("chat_template")

    @classmethod
    def load(cls, pack: Pack) -> "Tokenizer":
        """The tokenizer that was packed with the model; raises ModelError if there is none."""
        return cls(FastTokenizer.from_file(str(pack.tokenizer_file)), pack.tokenizer_info)

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Token ids of `text`; with `special`, the tokens that the model wants around a prompt are added."""
        return list(self._fast.encode(text, add_special_tokens=special).ids)

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation, ready for the assistant's answer.

        A model without a chat template gets the contents as they are, joined by newlines.
        """
        if self.chat_template is None:
            return self.encode("\n".join(message["content"] for message in messages))
        return self.encode(self.render(messages), special=False)

    def render(self, messages: Sequence[Message]) -> str:
        """The conversation through the model's chat template, with the opening of the assistant's turn."""
        from jinja2.exceptions import TemplateError

        try:
            rendered: str = _compile(self.chat_template or "").render(
                messages=list(messages),
                add_generation_prompt=True,
                bos_token=self.info.get("bos_token") or "",
                eos_token=self.info.get("eos_token") or "",
            )
            return rendered
        except TemplateError as error:
            raise ModelError(f"the model's chat template failed: {error}; --raw does without it") from error

    def stream(self) -> "TokenStream":
        """A decoder for one answer."""
        return TokenStream(self._fast)


class TokenStream:
    """Decodes one answer token by token and never emits part of a UTF-8 character."""

    def __init__(self, fast: FastTokenizer) -> None:
        self._fast = fast
        self._stream = DecodeStream(skip_special_tokens=True)

    def push(self, token: int) -> str:
        """The text that `token` completes, empty while a character is unfinished."""
        return self._stream.step(self._fast, token) or ""


def _compile(template: str) -> Any:
    """The template in jinja2's immutable sandbox, with the helpers that Hugging Face templates expect."""
    import json
    from datetime import datetime

    from jinja2.exceptions import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(template)
