"""An estimate of the usual length of a batch's requests, made before the tokenizer is loaded, to plan memory."""

from itertools import islice
from typing import Any

from master.api.failures import RequestError
from master.batch.source import URLS, BatchSource, parsed
from tpi.net.fields import UsualRequest

_CHARACTERS = 4  # approximate characters of a token, in most languages' vocabularies
_ANSWERS = {URLS[0]: 256, URLS[1]: 16}  # tokens, for lines without a limit; 16 is OpenAI's default for completions
_LOOKED_AT = 1000  # number of lines that are read


def usual_request(source: BatchSource) -> UsualRequest | None:
    """Return the mean lengths over the first thousand lines; None if no line is a request."""
    found = [one for one in map(_length, map(source.read, islice(source.lines, _LOOKED_AT))) if one is not None]
    if not found:
        return None
    prompts, answers = zip(*found, strict=True)
    return UsualRequest(max(1, sum(prompts) // len(found)), max(1, sum(answers) // len(found)))


def _length(raw: bytes) -> tuple[int, int] | None:
    """Return the approximate numbers of tokens of a line's prompt and answer; None if the line is not a request."""
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
    """Return the approximate number of tokens of all texts in a JSON value; a number counts as one token id."""
    if isinstance(value, str):
        return -(-len(value) // _CHARACTERS)
    if isinstance(value, dict):
        return sum(map(_tokens, value.values()))
    if isinstance(value, list):
        return sum(map(_tokens, value))
    return int(isinstance(value, int))
