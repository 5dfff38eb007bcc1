"""Fields that OpenAI's forms share: sampling, limits, and the form of an answer."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from master.api.answers import grammars
from master.api.failures import RequestError
from master.api.forms import Body, FormPart
from master.api.unused import CACHING, CALLER, NEUTRAL, SWITCHED_OFF
from master.vocabulary.sampler import REPEAT_PENALTY, Sampling

MOST_CHOICES = 16
MOST_LOGPROBS = 20
MOST_BIAS = 10_000
_MOST_STOPS = 16
_MOST_SALT = 1000  # characters


def _not_zero(tokens: int) -> int:
    if tokens == 0:
        raise ValueError("give at least 1, or -1 for as many as the context has room for")
    return tokens


TokenLimit = Annotated[int, Field(ge=-1), AfterValidator(_not_zero)]
"""Limit of an answer's tokens. -1, as in llama-server, means as many as the context has room for."""

TokenNumber = Annotated[str, Field(pattern=r"^\d{1,9}$")]
Effort = Annotated[str, Field(pattern=r"^[a-z]{1,20}$")]
"""Reasoning effort: `none`, `minimal`, `low`, `medium`, `high`, or another word that the chat template knows."""
Stop = Annotated[str, Field(min_length=1, max_length=1000)]


class SamplingFields(Body):
    """Settings of sampling. A missing setting has the default of the model's files, or else of `tpi run`."""

    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=1_000_000)
    min_p: float | None = Field(None, ge=0, le=1)
    repeat_penalty: float | None = Field(None, ge=REPEAT_PENALTY.low, le=10)
    repetition_penalty: float | None = Field(None, ge=REPEAT_PENALTY.low, le=10)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    seed: int | None = Field(None, ge=-1, lt=1 << 63)
    logit_bias: dict[TokenNumber, Annotated[float, Field(ge=-100, le=100)]] | None = Field(None, max_length=MOST_BIAS)

    prompt_cache_key: str | None = Field(None, max_length=_MOST_SALT)
    cache_salt: str | None = Field(None, min_length=1, max_length=_MOST_SALT)

    def salts(self) -> tuple[str | None, ...]:
        """Return the request's own salts for cached prefixes: OpenAI's `prompt_cache_key` and vLLM's `cache_salt`."""
        return (self.prompt_cache_key, self.cache_salt)

    def sampling(self) -> Sampling:
        """Return the settings for the sampler."""
        own = {
            "temperature": self.temperature,
            **nucleus(self.top_p, self.top_k),
            "min_p": self.min_p,
            "repeat_penalty": one_of(self, "repeat_penalty", "repetition_penalty"),
            "frequency_penalty": self.frequency_penalty,
            "presence_penalty": self.presence_penalty,
            "seed": self.seed,
        }
        bias = {int(token): value for token, value in (self.logit_bias or {}).items()}
        return Sampling.of(own, bias=bias)


def nucleus(top_p: float | None, top_k: int | None) -> dict[str, float | int | None]:
    """Return `top_p` and `top_k` for the sampler.

    A `top_p` of 0 means only the best token, a `top_k` of -1 all tokens.
    """
    if top_p == 0:
        return {"top_k": 1}
    return {"top_p": top_p, "top_k": 0 if top_k == -1 else top_k}


def one_of(form: FormPart, *names: str) -> Any:
    """Return the value of a field with several names; raise RequestError if two names have different values."""
    given = {name: getattr(form, name) for name in names if getattr(form, name) is not None}
    if len(set(given.values())) > 1:
        last = names[-1]
        said = f"{last}: its value differs from that of {names[0]}, which means the same; remove one of them"
        raise RequestError(said, last, "invalid_value")
    return next(iter(given.values()), None)


def limit_of(tokens: int | None) -> int | None:
    """Return the maximum number of tokens of an answer; None means the rest of the context."""
    return None if tokens == -1 else tokens


class StreamOptions(FormPart):
    """Options of a stream."""

    neutral = {"continuous_usage_stats": (False,), "include_obfuscation": (False,)}  # noqa: RUF012

    include_usage: bool = False


class CommonFields(SamplingFields):
    """Fields that chat completions and completions have in common."""

    harmless = CALLER | CACHING | SWITCHED_OFF | {"keep_alive", "prediction"}
    neutral = NEUTRAL

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = Field(None, ge=1, le=MOST_CHOICES)
    stop: Stop | Annotated[list[Stop], Field(max_length=_MOST_STOPS)] | None = None
    ignore_eos: bool | None = None

    def stops(self) -> tuple[str, ...]:
        """Return the texts that end an answer."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def with_usage(self) -> bool:
        """True if a stream ends with an event that has the token counts."""
        return self.stream_options is not None and self.stream_options.include_usage


class JsonSchema(FormPart):
    """The schema of an answer, and its name."""

    harmless = frozenset(("description", "name", "strict"))  # the schema is always enforced

    schema_: dict[str, Any] | bool = Field(alias="schema")


class TextFormat(FormPart):
    """The format of an answer that may be any text."""

    type: Literal["text"]


class JsonFormat(FormPart):
    """An answer that is any JSON object, or JSON that matches `schema` (llama-server's extension)."""

    type: Literal["json_object"]
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")


class SchemaFormat(FormPart):
    """An answer in JSON that matches a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


class PatternFormat(FormPart):
    """An answer that matches a whole regular expression."""

    type: Literal["regex"]
    pattern: str = Field(min_length=1, max_length=10_000)


ResponseFormat = Annotated[TextFormat | JsonFormat | SchemaFormat | PatternFormat, Field(discriminator="type")]


def grammar_of(form: TextFormat | JsonFormat | SchemaFormat | PatternFormat | None) -> tuple[str | None, str]:
    """Return the grammar of an answer, and the field that it comes from."""
    if isinstance(form, JsonFormat):
        if form.schema_ is not None:
            return grammars.of_schema(form.schema_), "response_format.schema"
        return grammars.of_schema(grammars.ANY_OBJECT), "response_format"
    if isinstance(form, SchemaFormat):
        return grammars.of_schema(form.json_schema.schema_), "response_format.json_schema.schema"
    if isinstance(form, PatternFormat):
        return grammars.of_pattern(form.pattern), "response_format.pattern"
    return None, ""
