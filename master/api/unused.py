"""Fields of other servers that this one does not use: the accepted values, and advice on what to send instead."""

from collections.abc import Mapping
from typing import Any

CALLER = frozenset(("metadata", "request_id", "safety_identifier", "user"))
"""Fields about the caller, which do not affect the answer."""

CACHING = frozenset(("cache_control", "prompt_cache_breakpoint", "prompt_cache_options", "prompt_cache_retention"))
"""Fields about caching. Prefixes stay cached as long as there is room, whatever the client sends."""

SENT_BACK = frozenset(("annotations", "logprobs", "phase", "provider_specific_fields", "reasoning_details", "status"))
"""Parts of earlier answers that clients send back, and that no chat template reads."""

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "add_special_tokens": (False,),
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "best_of": (1,),
    "cache_prompt": (True,),
    "detokenize": (True,),
    "documents": ([],),
    "dry_multiplier": (0,),
    "dynatemp_range": (0,),
    "early_stopping": (False,),
    "echo": (False,),
    "function_call": ("auto", "none"),
    "functions": ([],),
    "grammar": ("",),
    "id_slot": (-1,),
    "include_reasoning": (True,),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "lora": ([],),
    "min_tokens": (0,),
    "mirostat": (0,),
    "modalities": (["text"],),
    "n_keep": (0,),
    "n_predict": (-1,),
    "n_probs": (0,),
    "parse_tool_calls": (True,),
    "post_sampling_probs": (False,),
    "priority": (0,),
    "reasoning_format": ("auto", "deepseek"),
    "return_progress": (False,),
    "return_token_ids": (False,),
    "return_tokens": (False,),
    "return_tokens_as_token_ids": (False,),
    "service_tier": ("auto", "default"),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "stop_token_ids": ([],),
    "store": (False,),
    "suffix": ("",),
    "tfs_z": (1,),
    "timings_per_token": (False,),
    "top_a": (0,),
    "top_n_sigma": (-1,),
    "typical_p": (1,),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "xtc_probability": (0,),
}
"""Fields of OpenAI, vLLM and llama-server that are not supported, with the values that change nothing."""

SWITCHED_OFF = frozenset((
    "dry_allowed_length", "dry_base", "dry_penalty_last_n", "dry_sequence_breakers", "dynatemp_exponent",
    "min_keep", "mirostat_eta", "mirostat_tau", "xtc_threshold",
))  # fmt: skip
"""Settings of samplers that are not supported. They are ignored; a request to switch on such a sampler is refused."""

_ADVICE = {
    "best_of": "send n",
    "function_call": "send tool_choice, and calls as tool_calls",
    "functions": "send tools",
    "grammar": "send response_format",
    "guided_choice": "send response_format with a json_schema",
    "guided_json": "send response_format with a json_schema",
    "guided_regex": "send response_format of type regex",
    "json_schema": "send response_format with a json_schema",
    "n_predict": "send max_tokens",
    "structured_outputs": "send response_format",
    "typical_p": "send top_p or min_p",
}


def advice_on(name: str) -> str:
    """Return the message about a field that is unknown, or has an unsupported value."""
    return f"this field, or this value of it, is not supported; {_ADVICE.get(name, 'leave it out')}"
