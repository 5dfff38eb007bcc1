"""Frozen configuration: what a model is and what one node was told to do.

Nothing here computes. Model configuration is resolved once, when a model is packed: RoPE scaling has become `inv_freq`,
Gemma's `1 + w` is folded into the norm vectors, so that at run time no family is special.
"""

import re
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from tpi.errors import UsageError
from tpi.paths import directory_of

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "fatrelu", "drelu", "swiglu_clamped"]
SPARSE: frozenset[Activation] = frozenset({"relu", "relu2", "fatrelu", "drelu"})  # exactly 0 for most neurons
Norm = Literal["rms", "layer"]
BlockKind = Literal["attention", "ffn", "experts", "table", "vectors"]
Scores = Literal["softmax", "sigmoid"]
Format = Literal["f32", "bf16", "q8", "q4", "q4s", "mxfp4"]


@dataclass(frozen=True)
class Mixture:
    """The experts of a model's `experts` blocks, and how a token's are chosen.

    A router's product with the block's normed input is a logit for each routed expert. Scores of them choose `used`
    experts; what these come to is multiplied by their scores and added.
    """

    experts: int  # routed ones of a block
    used: int  # of them by a token
    width: int  # neurons of a routed expert
    shared: int = 0  # neurons of what every token uses beside them; 0: none
    scores: Scores = "softmax"  # over all experts, or of each alone
    normalised: bool = False  # the scores of those chosen are divided by their sum
    scale: float = 1.0  # multiplies the scores, after that
    groups: int = 1  # of neighbouring experts
    groups_used: int = 1  # the others' experts cannot be chosen
    group_best: int = 1  # a group counts for the sum of so many of its best scores


@dataclass(frozen=True)
class Latent:
    """Keys and values of all heads come from one vector of a token (multi-head latent attention, DeepSeek-V2).

    A head's key is the `rope` values that all heads share, rotated, and then values of its own. These, and its value,
    are products of the head's matrices with the `rank` values before, normed.
    """

    rank: int
    rope: int  # as many of a head's query are rotated, its first
    value: int  # values of a head's value; zeros follow up to `head_dim`
    norm_eps: float


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a decoder-only Transformer, as every node needs it.

    Sizes are counts of elements. `windows` holds one sliding-window length in tokens per layer, 0 for full attention.
    """

    family: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    context: int  # the longest position the model was made for, in tokens
    norm: Norm
    norm_eps: float
    activation: Activation
    gated: bool  # FFN is down(act(gate) * up) rather than down(act(up))
    inv_freq: tuple[float, ...]  # rotary frequencies, f32 values, head_dim/2 or fewer (partial rotary); empty: no RoPE
    attention_scale: float  # multiplies q.k, normally head_dim ** -0.5
    rope_scale: float = 1.0  # multiplies cos and sin (YaRN, Phi-3 long context)
    embed_scale: float = 1.0  # multiplies the embedding (Gemma)
    attention_softcap: float = 0.0  # 0: none
    logit_softcap: float = 0.0  # 0: none
    position_offset: int = -1  # row of the learned position table for position 0 (OPT: 2); -1: no table
    tied: bool = False  # the head is the embedding table
    windows: tuple[int, ...] = ()  # one per layer; empty: full attention everywhere
    logit_scale: float = 1.0  # multiplies the logits, before the softcap (Granite)
    long_inv_freq: tuple[float, ...] = ()  # in place of `inv_freq` if the context is longer than `original_context`
    original_context: int = 0
    local_inv_freq: tuple[float, ...] = ()  # of the layers whose kind is 2 (Gemma 3's sliding ones)
    local_rope_scale: float = 1.0
    activation_threshold: float = 0.0  # of fatrelu: what is not above it becomes 0; of swiglu_clamped: its limit
    activation_slope: float = 1.0  # of swiglu_clamped: multiplies gate inside the sigmoid
    parallel: bool = False  # all blocks of a layer read what came into it, and have one sum (Falcon)
    rope_kinds: tuple[int, ...] = ()  # per layer 0: no RoPE, 1: `inv_freq`, 2: `local_inv_freq`; empty: all 1
    whole_norms: bool = False  # queries and keys are normed over all heads at once (OLMoE)
    attention_clip: float = 0.0  # the largest magnitude of queries, keys and values, before RoPE; 0: any
    mixture: Mixture | None = None  # of the blocks of kind `experts`; None: there are none
    latent: Latent | None = None  # what keys and values come from; None: from the block's input

    @property
    def kv_width(self) -> int:
        """Vectors of each part that a KV head has in run `kv`: of its own part of the key, or of its value."""
        return max(self.head_dim - self.latent.rope, self.latent.value) if self.latent else self.head_dim

    @property
    def kv_hidden(self) -> int:
        """Values that vectors of run `kv` are multiplied with."""
        return self.latent.rank if self.latent else self.hidden

    @property
    def latent_values(self) -> int:
        """Vectors of run `latent`: the values that are normed, and those that are rotated; 0 if there is none."""
        return self.latent.rank + self.latent.rope if self.latent else 0

    def rope(self, layer: int) -> tuple[tuple[float, ...], float]:
        """Rotary frequencies of `layer` (empty: none), and what multiplies their cosine and sine."""
        kind = self.rope_kinds[layer] if self.rope_kinds else 1
        return (((), 1.0), (self.inv_freq, self.rope_scale), (self.local_inv_freq, self.local_rope_scale))[kind]

    def for_context(self, context: int) -> "ModelConfig":
        """The configuration for sequences of up to `context` tokens: beyond `original_context` LongRoPE's long factors
        hold for all positions, as in llama.cpp (transformers goes over to them when a sequence becomes longer, and
        leaves the keys of before as they are)."""
        if not self.long_inv_freq or context <= self.original_context:
            return self
        return replace(self, inv_freq=self.long_inv_freq)

    def window(self, layer: int) -> int:
        """Sliding window of `layer` in tokens, 0 for full attention."""
        return self.windows[layer] if self.windows else 0

    def to_dict(self) -> dict[str, Any]:
        """Plain types for JSON and msgpack."""
        return asdict(self)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "ModelConfig":
        """Inverse of `to_dict`; lists become tuples. Raises TypeError on unknown or missing fields."""
        plain: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()
        }
        if plain.get("mixture") is not None:
            plain["mixture"] = Mixture(**plain["mixture"])
        if plain.get("latent") is not None:
            plain["latent"] = Latent(**plain["latent"])
        return cls(**plain)


MOST_BYTES = 1 << 50  # of any size that a user gives

_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(?:([KMGT])(i?)B?|B)?\s*", re.IGNORECASE)


def parse_size(text: str, what: str = "") -> int:
    """Return the bytes meant by `4GiB`, `600MiB`, `1.5 GB`, `512B` or `0`; errors begin with `what`, the option.

    Raises:
        UsageError: if `text` is not a size, has no unit, or is over 1024 TiB.
    """
    match, given = _SIZE.fullmatch(text), f"{what} {text!r}".lstrip()
    if match is None:
        raise UsageError(f"{given} is not a size; write for example 600MiB or 4GiB")
    number, prefix, binary = match.groups()
    size = float(number) * (1024 if binary else 1000) ** (" KMGT".index(prefix.upper()) if prefix else 0)
    if size > MOST_BYTES:
        raise UsageError(f"{given} is beyond reason: more than 1024 TiB; write for example 600MiB or 4GiB")
    if size and text.strip() == number:
        raise UsageError(f"{given} has no unit; do you mean {number}GiB or {number}MiB? ({number}B: bytes)")
    return int(size)


def default_cache() -> Path:
    """Return the directory for packs and shards: `TPI_CACHE`, else `$XDG_CACHE_HOME/tpi`, else `~/.cache/tpi`.

    Raises:
        UsageError: if the user has no home directory and neither variable is set.
    """
    return directory_of("TPI_CACHE", "XDG_CACHE_HOME", ".cache")


def another_place(path: Path) -> str:
    """Return how to move what is at `path`, if that is inside the default cache; else an empty string."""
    with suppress(UsageError):
        if path.is_relative_to(default_cache()):
            return "set TPI_CACHE to a directory that can be written"
    return ""


def default_config() -> Path:
    """Return the directory for this machine's keys: `TPI_CONFIG`, else `$XDG_CONFIG_HOME/tpi`, else `~/.config/tpi`.

    Raises:
        UsageError: if the user has no home directory and neither variable is set.
    """
    return directory_of("TPI_CONFIG", "XDG_CONFIG_HOME", ".config")
