"""Frozen configuration of a model, and the sizes and directories that users name.

A model's configuration is resolved once, when the model is packed: RoPE scaling becomes `inv_freq`, and Gemma's `1 + w`
is folded into the norm vectors. So no family is special at run time.
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
BlockKind = Literal["attention", "delta", "conv", "mamba", "ffn", "experts", "table", "vectors"]
RECURRENT: frozenset[BlockKind] = frozenset(
    {"delta", "conv", "mamba"}
)  # kinds with a state in place of keys and values
Scores = Literal["softmax", "sigmoid"]
Format = Literal[
    "f32",
    "bf16",
    "f16",
    "q8",
    "q4",
    "q4s",
    "mxfp4",
    "q6",
    "q5",
    "q3",
    "q2",
    "iq4",
    "iq3s",
    "iq3",
    "iq2",
    "iq1",
    "nvfp4",
]


@dataclass(frozen=True)
class Mixture:
    """The experts of a model's `experts` blocks, and how a token's experts are chosen.

    The router's product with the block's normed input is a logit for each routed expert. Scores computed from the
    logits select `used` experts. Their outputs are multiplied by their scores and added.
    """

    experts: int  # routed experts in a block
    used: int  # routed experts that a token uses
    width: int  # neurons of a routed expert
    shared: int = 0  # neurons of the shared experts, which every token uses; 0: none
    scores: Scores = "softmax"  # softmax over all experts, or sigmoid of each logit
    normalised: bool = False  # the scores of the chosen experts are divided by their sum
    scale: float = 1.0  # multiplies the scores, after normalisation
    groups: int = 1  # number of groups of neighbouring experts
    groups_used: int = 1  # number of groups whose experts may be chosen
    group_best: int = 1  # a group's score is the sum of its `group_best` highest scores


@dataclass(frozen=True)
class Latent:
    """Settings of multi-head latent attention (DeepSeek-V2).

    The keys and values of all heads come from one vector per token. A head's key is `rope` rotated values, shared by
    all heads, followed by values of its own. The head's own key values and its value are products of the head's
    matrices with the normed `rank` values. Queries may come from a vector of their own in the same way.
    """

    rank: int
    rope: int  # number of rotated values; the first `rope` values of a head's query are rotated too
    value: int  # length of a head's value vector; zeros follow up to `head_dim`
    norm_eps: float  # epsilon of the norms of both vectors
    query_rank: int = 0  # values of the vector that queries come from; 0: queries come from the block's input


@dataclass(frozen=True)
class Delta:
    """Settings of gated DeltaNet blocks, which take the place of attention in some layers (Qwen3-Next, Qwen3.5).

    Each value head has a state, a matrix `[key, value]` that every token changes. Queries, keys and values first pass a
    causal convolution over time, separately in each channel (Yang et al. 2024, Gated Delta Networks, section 3).
    """

    heads: int  # value heads
    key_heads: int  # heads of queries and keys; `heads / key_heads` neighbouring value heads share one
    key: int  # values of a query, and of a key
    value: int  # values of a value head
    taps: int  # tokens that the convolution sees, the token itself included

    @property
    def unit_heads(self) -> int:
        """Smallest number of value heads that a node may hold."""
        return 1


@dataclass(frozen=True)
class Mamba:
    """Settings of Mamba2 blocks, which take the place of attention in some layers (Granite 4-h).

    The states are computed like those of `Delta`, and the fields have the same names: the C of a token is its query, B
    its key, x its values (Dao and Gu 2024, arXiv:2405.21060, section 7).
    """

    heads: int
    key_heads: int  # groups of neighbouring heads that share B and C, and whose results are normed together
    key: int  # values of B, and of C
    value: int  # values of a head
    taps: int  # tokens that the convolution sees, the token itself included
    norm_eps: float  # epsilon of the norm of the results
    least_step: float = 0.0  # limits of the step size
    most_step: float = 0.0  # 0: no upper limit

    @property
    def unit_heads(self) -> int:
        """Smallest number of heads that a node may hold.

        It is the number of heads in a group that is normed together, or 1 if there is only one group.
        """
        return self.heads // self.key_heads if self.key_heads > 1 else 1


@dataclass(frozen=True)
class FullHeads:
    """Heads of layers without a sliding window, in models whose other layers have heads of another number or size."""

    kv_heads: int
    head_dim: int


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
    context: int  # the longest context that the model was made for, in tokens
    norm: Norm
    norm_eps: float
    activation: Activation
    gated: bool  # FFN is down(act(gate) * up) rather than down(act(up))
    inv_freq: tuple[float, ...]  # rotary frequencies, f32 values, head_dim/2 or fewer (partial rotary); empty: no RoPE
    attention_scale: float  # multiplies q.k, normally head_dim ** -0.5
    rope_scale: float = 1.0  # multiplies cos and sin (YaRN, Phi-3 long context)
    embed_scale: float = 1.0  # multiplies the embedding (Gemma)
    embed_norm: bool = False  # the embedding is divided by its root mean square (Muse Glimmer)
    attention_softcap: float = 0.0  # scores become cap * tanh(score / cap); 0: no cap
    logit_softcap: float = 0.0  # caps the logits in the same way; 0: no cap
    position_offset: int = -1  # row of the learned position table for position 0 (OPT: 2); -1: no table
    tied: bool = False  # the head is the embedding table
    windows: tuple[int, ...] = ()  # one per layer; empty: full attention everywhere
    logit_scale: float = 1.0  # multiplies the logits, before the softcap (Granite)
    long_inv_freq: tuple[float, ...] = ()  # replaces `inv_freq` if the context is longer than `original_context`
    original_context: int = 0
    local_inv_freq: tuple[float, ...] = ()  # for layers of RoPE kind 2 (Gemma 3's sliding layers)
    local_rope_scale: float = 1.0
    activation_threshold: float = 0.0  # fatrelu: values not above it become 0; swiglu_clamped: its limit
    activation_slope: float = 1.0  # swiglu_clamped: multiplies the gate inside the sigmoid
    parallel: bool = False  # all blocks of a layer read the layer's input, and share one sum (Falcon)
    rope_kinds: tuple[int, ...] = ()  # per layer 0: no RoPE, 1: `inv_freq`, 2: `local_inv_freq`; empty: all 1
    whole_norms: bool = False  # queries and keys are normed over all heads at once (OLMoE)
    query_growth: float = 0.0  # queries are multiplied by 1 + this * ln(1 + position // original_context) (Ministral 3)
    attention_clip: float = 0.0  # limit of the magnitude of queries, keys and values, before RoPE; 0: no limit
    mixture: Mixture | None = None  # settings of blocks of kind `experts`; None: there are none
    latent: Latent | None = None  # latent attention; None: keys and values come from the block's input
    output_gate: bool = False  # the sigmoid of a product of the input multiplies what the heads attend to (Qwen3.5)
    delta: Delta | None = None  # settings of blocks of kind `delta`; None: there are none
    mamba: Mamba | None = None  # settings of blocks of kind `mamba`; None: there are none
    conv_taps: int = 0  # tokens that blocks of kind `conv` see, gated short convolutions (LFM2); 0: there are none
    recurrent: tuple[int, ...] = ()  # per layer 1: its first block is of a kind in `RECURRENT`; empty: none is
    full_heads: FullHeads | None = None  # heads of layers without a window (Gemma 4); None: as in the other layers
    parallel_experts: bool = False  # a dense FFN reads the same input as the experts; both share one sum (Gemma 4)
    shared_kv: int = 0  # number of last layers that read an earlier layer's keys and values (Gemma 4 E2B): `kv_layer`
    wide_ffn: bool = False  # layers that read the keys of another have twice as many neurons
    per_layer: int = 0  # values of a token's embedding for each layer, which the layer adds at its end; 0: none
    value_norm: bool = False  # values are divided by their root mean square, head by head (Gemma 4)
    plain_head_norms: bool = False  # queries and keys are divided by their root mean square, head by head
    post_norm_eps: float | None = None  # epsilon of the norms of the output of blocks; None: that of the other norms
    late_head_norms: bool = False  # queries and keys are normed after RoPE, not before (Hunyuan)
    input_norm: bool = True  # blocks norm their input; False: they norm their output alone (OLMo 2)
    mtp_whole: bool = False  # the layer for multi-token prediction reads each embedding; False: zeros for the first row

    @property
    def kv_width(self) -> int:
        """Number of vectors in run `kv` for a KV head's keys; the run has as many vectors for the head's values.

        With latent attention, the rotated part of the keys is not among them, and the shorter part is padded.
        """
        return max(self.head_dim - self.latent.rope, self.latent.value) if self.latent else self.head_dim

    @property
    def kv_hidden(self) -> int:
        """Length of the input that vectors of run `kv` are multiplied with."""
        return self.latent.rank if self.latent else self.hidden

    @property
    def latent_values(self) -> int:
        """Vectors in run `latent`: `rank` for normed values and `rope` for rotated ones; 0 without latent attention."""
        return self.latent.rank + self.latent.rope if self.latent else 0

    @property
    def query_rank(self) -> int:
        """Vectors in run `query_latent`, from whose values queries are made; 0 if they are made from the input."""
        return self.latent.query_rank if self.latent else 0

    def rope(self, layer: int) -> tuple[tuple[float, ...], float]:
        """Return the rotary frequencies of `layer` (empty: none), and the scale of their cosine and sine."""
        kind = self.rope_kinds[layer] if self.rope_kinds else 1
        return (((), 1.0), (self.inv_freq, self.rope_scale), (self.local_inv_freq, self.local_rope_scale))[kind]

    def for_context(self, context: int) -> "ModelConfig":
        """Return the configuration for sequences of up to `context` tokens.

        Beyond `original_context`, LongRoPE's long factors apply to all positions, as in llama.cpp. (transformers
        switches to them when a sequence becomes longer, and leaves earlier keys unchanged.)
        """
        if not self.long_inv_freq or context <= self.original_context:
            return self
        return replace(self, inv_freq=self.long_inv_freq)

    def window(self, layer: int) -> int:
        """Return the sliding window of `layer` in tokens, 0 for full attention."""
        return self.windows[layer] if self.windows else 0

    def has_full_heads(self, layer: int) -> bool:
        """Return True if the heads of `layer` are those of `full_heads`."""
        return self.full_heads is not None and not self.window(layer)

    def at_layer(self, layer: int) -> "ModelConfig":
        """Return the configuration with the `kv_heads`, the `head_dim` and the `intermediate` of `layer`.

        The result's `shared_kv` is 1 if the layer has no keys and values of its own, else 0.
        """
        found = self
        if self.full_heads is not None and not self.window(layer):
            heads = self.full_heads
            found = replace(self, kv_heads=heads.kv_heads, head_dim=heads.head_dim, full_heads=None)
        if not self.shared_kv:
            return found
        shared = self.kv_layer(layer) != layer
        wide = (2 if shared and self.wide_ffn else 1) * self.intermediate
        return replace(found, shared_kv=int(shared), wide_ffn=False, intermediate=wide)

    def kv_layer(self, layer: int) -> int:
        """Return the layer whose keys and values `layer` attends to: itself, or the last of its kind that has any."""
        own = self.layers - self.shared_kv
        if layer < own:
            return layer
        return max(at for at in range(own) if bool(self.window(at)) == bool(self.window(layer)))

    @property
    def stage_cuts(self) -> tuple[int, ...]:
        """The layers at which a stage may begin, and the number of layers.

        No layer of a stage may use the keys and values of a layer before the stage.
        """
        cuts = range(self.layers + 1)
        return tuple(cut for cut in cuts if all(self.kv_layer(at) >= cut for at in range(cut, self.layers)))

    def has_wide_ffn(self, layer: int) -> bool:
        """Return True if `layer` has twice the neurons of the first layers."""
        return self.wide_ffn and self.kv_layer(layer) != layer

    @property
    def per_layer_values(self) -> int:
        """Number of values in the embeddings of one token for all layers together."""
        return self.layers * self.per_layer

    def is_recurrent(self, layer: int) -> bool:
        """Return True if `layer` has a state in place of keys and values."""
        return bool(self.recurrent and self.recurrent[layer])

    @property
    def host_only(self) -> str:
        """Name, for messages, of a part of the model that only the CPU computes.

        The result is empty if accelerators compute all of it.
        """
        if any(self.recurrent):
            return "recurrent layers"
        if self.output_gate:
            return "gates of heads"
        if self.per_layer or self.shared_kv:
            return "embeddings of each layer" if self.per_layer else "shared keys and values"
        return "normed values" if self.value_norm else ""

    @property
    def mixers(self) -> tuple[BlockKind, ...]:
        """The kind of each layer's first block."""
        recurrent: BlockKind = "mamba" if self.mamba else "delta" if self.delta else "conv"
        return tuple(recurrent if self.is_recurrent(layer) else "attention" for layer in range(self.layers))

    @property
    def state_heads(self) -> Delta | Mamba | None:
        """The heads of recurrent layers, or None if these have no heads."""
        return self.delta or self.mamba

    def state_values(self, values: int, keys: int, later: int) -> int:
        """Return the number of float32 values of a sequence's state in a recurrent layer.

        `values` and `keys` are the numbers of vectors that each part of a node's units has in the runs of these names.
        The channels of a short convolution count as values. The inputs of `later` further tokens are stored with the
        state (`tpi.kernels.recurrent.spec`).
        """
        heads = self.state_heads
        if heads is None:
            return (self.conv_taps - 1 + later) * values
        inputs = (heads.taps - 1 + later) * (2 * keys + values)
        return values * heads.key + inputs + 2 * later * (values // heads.value)

    def to_dict(self) -> dict[str, Any]:
        """Return the configuration as plain types for JSON and msgpack."""
        return asdict(self)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "ModelConfig":
        """Return the configuration that `to_dict` converted; lists become tuples.

        Raises:
            TypeError: on unknown or missing fields.
        """
        plain: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()
        }
        for name, settings in _SETTINGS.items():
            if plain.get(name) is not None:
                plain[name] = settings(**plain[name])
        return cls(**plain)


_SETTINGS = {"mixture": Mixture, "latent": Latent, "delta": Delta, "mamba": Mamba, "full_heads": FullHeads}
MOST_BYTES = 1 << 50  # limit of any size that a user gives

_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(?:([KMGT])(i?)B?|B)?\s*", re.IGNORECASE)


def parse_size(text: str, what: str = "") -> int:
    """Return the bytes that `4GiB`, `600MiB`, `1.5 GB`, `512B` or `0` stands for. Errors begin with `what`, the option.

    Raises:
        UsageError: if `text` is not a size, has no unit, or is over 1024 TiB.
    """
    match, given = _SIZE.fullmatch(text), f"{what} {text!r}".lstrip()
    if match is None:
        raise UsageError(f"{given} is not a size; write for example 600MiB or 4GiB")
    number, prefix, binary = match.groups()
    size = float(number) * (1024 if binary else 1000) ** (" KMGT".index(prefix.upper()) if prefix else 0)
    if size > MOST_BYTES:
        raise UsageError(f"{given} is too large: more than 1024 TiB; write for example 600MiB or 4GiB")
    if size and text.strip() == number:
        raise UsageError(f"{given} has no unit; do you mean {number}GiB or {number}MiB? ({number}B: bytes)")
    return int(size)


def default_cache() -> Path:
    """Return the directory for packs and shards: `TPI_CACHE`, else `$XDG_CACHE_HOME/tpi`, else `~/.cache/tpi`.

    Raises:
        UsageError: if the user has no home directory and neither variable is set.
    """
    return directory_of("TPI_CACHE", "XDG_CACHE_HOME", ".cache")


def cache_advice(path: Path) -> str:
    """Return advice for moving the cache if `path` is inside the default one; else an empty string."""
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
