"""The tokenizer of a pack: tokenizer.json for the library `tokenizers`, special tokens, and chat templates."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, processors

from tpi.errors import ModelError
from tpi.pack.builder.ggufvocab import check_vocabulary, convert
from tpi.pack.builder.sampling import sampling_of_directory, sampling_of_gguf
from tpi.pack.library.store import write_synced
from tpi.sources.files import read_json_if_there, read_text, resolve_inside
from tpi.sources.gguf import GgufSource

TOKENIZER = "tokenizer.json"
MORE_TEMPLATES = "additional_chat_templates"  # a directory next to the model, as in transformers
_TOOL_USE = "tool_use"  # the name of a template for conversations with tools
_MAX_BYTES = 64 << 20
_OTHER_FILES = ("tokenizer.model", "vocab.json", "spiece.model", "tiktoken.model")
# Tokens that end a turn in common chat formats. A model's files may name only some of them.
_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>",
         "<turn|>", "<|tool_response>")  # fmt: skip
_CHANNEL_ENDS = ("<|return|>", "<|call|>", "<|endoftext|>")


def from_directory(directory: Path, config: dict[str, Any], vocab: int, out: Path) -> dict[str, Any]:
    """Write the tokenizer.json of a Hugging Face directory to `out` and return the manifest's tokenizer metadata.

    The metadata is empty, and nothing is written, if there is no tokenizer. `config` is the model's config.json,
    `vocab` its number of tokens.

    Raises:
        ModelError: if there is a tokenizer, but it cannot be read or converted.
    """
    tokenizer = _load_directory(directory)
    if tokenizer is None:
        return {}
    settings = read_json_if_there(directory, "tokenizer_config.json")
    special = read_json_if_there(directory, "special_tokens_map.json") | settings
    generation = read_json_if_there(directory, "generation_config.json")
    bos, eos = _content(special.get("bos_token")), _content(special.get("eos_token"))
    bos_id = tokenizer.token_to_id(bos) if bos else None
    template, tools = _templates(directory, settings)
    ends = [*_ids(generation.get("eos_token_id")), *_ids(config.get("eos_token_id"))]
    named = [end for end in _ends(tokenizer) if end in f"{template} {tools}"]
    ends = _without_messages(tokenizer, ends + _named(tokenizer, [eos or "", *named]))
    _set_bos(tokenizer, bos, bos_id, settings.get("add_bos_token"))
    saved = _save(tokenizer, out, bos, bos_id, eos, [end for end in ends if end < vocab], template, tools)
    return saved | _said(sampling_of_directory(generation))


def from_gguf(source: GgufSource, out: Path) -> dict[str, Any]:
    """Convert a GGUF file's tokenizer to tokenizer.json in `out` and return the manifest's tokenizer metadata.

    The metadata is empty, and nothing is written, if the file has no tokenizer.

    Raises:
        ModelError: if the file has a tokenizer, but it cannot be converted.
    """
    metadata = {
        key.removeprefix("tokenizer.ggml."): value
        for key, value in source.metadata.items()
        if key.startswith("tokenizer.ggml.")
    }
    if "tokens" not in metadata:
        return {}
    words = check_vocabulary(source)
    tokenizer, pieces = convert(source), words is None
    bos_id, eos_id = (
        metadata.get("bos_token_id", 1 if pieces else None),
        metadata.get("eos_token_id", 2 if pieces else None),
    )
    bos = tokenizer.id_to_token(bos_id) if type(bos_id) is int else None
    eos = tokenizer.id_to_token(eos_id) if type(eos_id) is int else None
    ends = [eos_id, metadata.get("eot_token_id"), metadata.get("eom_token_id"), *_ids(metadata.get("eos_token_ids"))]
    by_default = words is None or words.bos
    _set_bos(tokenizer, bos, bos_id, bool(metadata.get("add_bos_token", by_default)))
    if metadata.get("add_eos_token") and eos is not None and eos_id is not None:
        _add_eos(tokenizer, bos, bos_id, eos, eos_id)
    known = [end for end in ends if type(end) is int] + _named(tokenizer, _ends(tokenizer))
    known = _without_messages(tokenizer, known)
    templates = [source.text(key) for key in ("tokenizer.chat_template", f"tokenizer.chat_template.{_TOOL_USE}")]
    saved = _save(tokenizer, out, bos, bos_id, eos, known, *templates)
    return saved | _said(sampling_of_gguf(source.metadata))


def _said(sampling: dict[str, Any]) -> dict[str, Any]:
    return {"sampling": sampling} if sampling else {}


def _load_directory(directory: Path) -> Tokenizer | None:
    if (directory / TOKENIZER).exists():
        path = resolve_inside(directory, TOKENIZER)
        if path.stat().st_size > _MAX_BYTES:
            raise ModelError(f"{path} is larger than {_MAX_BYTES} bytes; refused")
        try:
            return Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise ModelError(f"{path} cannot be read ({error}); download it again") from error
    if not any((directory / name).exists() for name in _OTHER_FILES):
        return None
    from transformers import AutoTokenizer

    try:
        return Tokenizer.from_str(AutoTokenizer.from_pretrained(str(directory)).backend_tokenizer.to_str())
    except Exception as error:  # a conversion may raise any exception
        raise ModelError(f"the tokenizer of {directory} cannot be converted ({error}); add a tokenizer.json") from error


def _set_bos(tokenizer: Tokenizer, bos: str | None, bos_id: int | None, wanted: object) -> None:
    """Make the tokenizer put `bos` before each text if `wanted` is true, and not if it is false.

    If `wanted` is None, nothing changes.
    """
    adds = _adds(tokenizer, bos_id)
    if wanted is None or bos is None or bos_id is None or adds == bool(wanted):
        return
    single = f"{bos} $A" if wanted else "$A"
    tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=[(bos, bos_id)])


def _add_eos(tokenizer: Tokenizer, bos: str | None, bos_id: int | None, eos: str, eos_id: int) -> None:
    """Make the tokenizer put `eos` after each text, as the files of embedding models demand."""
    begun = bos is not None and bos_id is not None and _adds(tokenizer, bos_id)
    special = [(eos, eos_id)] + ([(bos, bos_id)] if begun else [])
    single = f"{bos} $A {eos}" if begun else f"$A {eos}"
    tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=special)


def _adds(tokenizer: Tokenizer, bos_id: int | None) -> bool:
    ids = tokenizer.encode("a").ids
    return bos_id is not None and ids[:1] == [bos_id] and tokenizer.encode("a", add_special_tokens=False).ids != ids


def _save(
    tokenizer: Tokenizer, out: Path, bos: str | None, bos_id: int | None, eos: str | None, ends: list[int],
    template: str | None, tools: str | None,
) -> dict[str, Any]:  # fmt: skip
    tokenizer.no_padding()
    tokenizer.no_truncation()
    write_synced(out / TOKENIZER, tokenizer.to_str(pretty=False).encode())  # raises OSError if the disk is full
    own = {} if tools is None or template is None else {"tool_template": tools}
    return own | {
        "bos_token": bos,
        "eos_token": eos,
        "bos_id": bos_id,
        "eos_ids": list(dict.fromkeys(ends)),
        "add_bos": _adds(tokenizer, bos_id),
        "chat_template": tools if template is None else template,
    }


def _templates(directory: Path, settings: dict[str, Any]) -> tuple[str | None, str | None]:
    """Return the chat template, and the separate template for conversations with tools; each may be None.

    As in transformers, template files take precedence over tokenizer_config.json, which takes precedence over
    chat_template.json.
    """
    own = dict(_template_files(directory))
    listed = settings.get("chat_template")
    if isinstance(listed, list):
        named = {item.get("name"): item.get("template") for item in listed if isinstance(item, dict)}
    else:
        named = {"default": listed}
    default = own.get("default") or named.get("default")
    if default is None:
        default = read_json_if_there(directory, "chat_template.json").get("chat_template")
    others = (template for name, template in named.items() if name != _TOOL_USE)
    found = (default or next(others, None), (own if own else named).get(_TOOL_USE))
    template, tools = (one if isinstance(one, str) else None for one in found)
    return template, tools


def _template_files(directory: Path) -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each chat template that is stored in a file of its own."""
    if (directory / "chat_template.jinja").exists():
        yield "default", read_text(directory, "chat_template.jinja")
    more = directory / MORE_TEMPLATES
    if (more / f"{_TOOL_USE}.jinja").exists() and not more.is_symlink():
        yield _TOOL_USE, read_text(more, f"{_TOOL_USE}.jinja")


def _content(token: object) -> str | None:
    found = token.get("content") if isinstance(token, dict) else token
    return found if isinstance(found, str) else None


def _ids(value: object) -> list[int]:
    """Return the token ids in `value`, which may be one number, a list of numbers, or None."""
    return [item for item in (value if isinstance(value, list) else [value]) if type(item) is int]


def _has_channels(tokenizer: Tokenizer) -> bool:
    """Return True if an answer may consist of several messages (gpt-oss).

    In such an answer, the end of a message is not the end of the answer.
    """
    return all(tokenizer.token_to_id(name) is not None for name in ("<|channel|>", "<|return|>"))


def _ends(tokenizer: Tokenizer) -> tuple[str, ...]:
    """Return the well-known tokens that end an answer in this tokenizer's chat format."""
    return _CHANNEL_ENDS if _has_channels(tokenizer) else _ENDS


def _without_messages(tokenizer: Tokenizer, ends: list[int]) -> list[int]:
    """Return `ends` without the token that ends a message, if an answer may consist of several messages."""
    message = tokenizer.token_to_id("<|end|>") if _has_channels(tokenizer) else None
    return [end for end in ends if end != message]


def _named(tokenizer: Tokenizer, names: Iterable[str]) -> list[int]:
    found = [tokenizer.token_to_id(name) for name in names]
    return [identity for identity in found if identity is not None]
