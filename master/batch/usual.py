"""How long the requests of a batch usually are, before there is a tokenizer: what room is planned for."""

from itertools import islice
from typing import Any

from master.api.failures import RequestError
from master.batch.source import URLS, BatchSource, parsed
from tpi.net.fields import UsualRequest

_CHARACTERS = 4  # of a token, about, in most languages' vocabularies
_ANSWERS = {URLS[0]: 256, URLS[1]: 16}  # tokens, where a line sets no limit; a completion has 16 then
_LOOKED_AT = 1000  # lines


def usual_request(source: BatchSource) -> UsualRequest | None:
    """The means over the first thousand lines; None where none of them is a request."""
    found = [one for one in map(_length, map(source.read, islice(source.lines, _LOOKED_AT))) if one is not None]
    if not found:
        return None
    prompts, answers = zip(*found, strict=True)
    return UsualRequest(max(1, sum(prompts) // len(found)), max(1, sum(answers) // len(found)))


def _length(raw: bytes) -> tuple[int, int] | None:
    """Tokens of a line's prompt and answer, about."""
    try:
        request = parsed(raw)
    except RequestError:
        return None
    body = request.body
    prompt = _tokens(body.get("messages", body.get("prompt")))
    limits = [body.get("max_completion_tokens"), body.get("max_tokens")]
    answer = next((limit for limit in limits if type(limit) is int and limit > 0), _ANSWERS[request.url])
    return prompt, answer


def _tokens(value: Any) -> int:
    """Of all texts in it; a number is a token's id."""
    if isinstance(value, str):
        return -(-len(value) // _CHARACTERS)
    if isinstance(value, dict):
        return sum(map(_tokens, value.values()))
    if isinstance(value, list):
        return sum(map(_tokens, value))
    return int(isinstance(value, int))
