"""Parts of OpenAI's answers: usage, llama-server's timings, log probabilities, the end of a stream."""

import time
from collections.abc import Iterable, Sequence
from secrets import token_hex
from typing import Any

from master.api.answers.events import Ended, TokenLogprob
from master.api.failures import ApiFailure, openai_form
from master.api.streams import data

DONE = "data: [DONE]\n\n"
_MILLI = 1e3


def identity(kind: str) -> dict[str, Any]:
    """Return the fields that all answers begin with; `kind` is the prefix of the id."""
    return {"id": f"{kind}-{token_hex(12)}", "created": int(time.time())}


def usage(ended: Sequence[Ended]) -> dict[str, Any]:
    """Return OpenAI's `usage` for all answers to one prompt. The prompt counts once."""
    prompt, made = ended[0].prompt_tokens, sum(one.completion_tokens for one in ended)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": made,
        "total_tokens": prompt + made,
        "prompt_tokens_details": {"cached_tokens": ended[0].cached},
        "completion_tokens_details": {
            "reasoning_tokens": sum(one.reasoning_tokens for one in ended),
            "accepted_prediction_tokens": sum(one.drafts.right for one in ended),
            "rejected_prediction_tokens": sum(one.drafts.made - one.drafts.right for one in ended),
        },
    }


def timings(ended: Ended) -> dict[str, Any]:
    """Return llama-server's `timings`: computed tokens, milliseconds, and rates."""
    prompt, predicted = ended.prompt_tokens - ended.cached, ended.completion_tokens
    return {
        "cache_n": ended.cached,
        **_rates("prompt", prompt, ended.timings.prompt_s),
        **_rates("predicted", predicted, ended.timings.predicted_s),
        "draft_n": ended.drafts.made,
        "draft_n_accepted": ended.drafts.right,
    }


def _rates(name: str, count: int, seconds: float) -> dict[str, Any]:
    return {
        f"{name}_n": count,
        f"{name}_ms": _MILLI * seconds,
        f"{name}_per_token_ms": _MILLI * seconds / max(count, 1),
        f"{name}_per_second": count / seconds if seconds else 0.0,
    }


def chat_logprobs(tokens: Iterable[TokenLogprob]) -> dict[str, Any]:
    """Return log probabilities in the form of chat completions."""
    content = [
        _token(one.text, one.data, one.logprob) | {"top_logprobs": [_token(*best) for best in one.best]}
        for one in tokens
    ]
    return {"content": content, "refusal": None}


def text_logprobs(tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    """Return the log probabilities of `tokens` as the `logprobs` object of OpenAI's API for completions."""
    return {
        "tokens": [one.text for one in tokens],
        "token_logprobs": [one.logprob for one in tokens],
        "top_logprobs": [_likely(one) for one in tokens],
        "text_offset": [one.at for one in tokens],
    }


def _likely(token: TokenLogprob) -> dict[str, float]:
    """Return the log probabilities of the best and the sampled tokens by text; of equal texts, the higher value."""
    found: dict[str, float] = {}
    for text, _, value in token.best:
        found.setdefault(text, value)
    found.setdefault(token.text, token.logprob)
    return found


def failed(failure: ApiFailure) -> list[str]:
    """Return the events that end a stream with an error."""
    return [data(openai_form(failure)), DONE]


def _token(text: str, raw: bytes, value: float) -> dict[str, Any]:
    return {"token": text, "bytes": list(raw), "logprob": value}
