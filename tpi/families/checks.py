"""Checks of a model configuration against limits, for configurations from model files and from packs."""

import math
from typing import get_args

from tpi.config import Activation, Delta, Latent, Mamba, Mixture, ModelConfig, Norm, Scores
from tpi.errors import ModelError
from tpi.partition import FFN_UNIT

_LIMITS = {
    "hidden": 1 << 17,
    "layers": 1 << 12,
    "heads": 1 << 12,
    "kv_heads": 1 << 12,
    "head_dim": 1 << 12,
    "intermediate": 1 << 20,
    "vocab": 1 << 24,
    "context": 1 << 30,
}
_MOST_TAPS = 64


def check_config(config: ModelConfig, where: str) -> None:
    """Check that the values of a configuration are in range and consistent. `where` names the source in messages.

    Raises:
        ModelError: if a check fails; the message names the field.
    """
    for name, limit in _LIMITS.items():
        value = getattr(config, name)
        if type(value) is not int or not 1 <= value <= limit:
            raise ModelError(f"{where}: {name} is {value!r}; a whole number from 1 to {limit} is expected")
    if config.heads % config.kv_heads:
        raise ModelError(f"{where}: {config.heads} query heads are not a multiple of {config.kv_heads} KV heads")
    if config.activation not in get_args(Activation) or config.norm not in get_args(Norm):
        raise ModelError(f"{where}: activation {config.activation!r} or norm {config.norm!r} is not supported")
    if config.mixture is not None:
        check_mixture(config.mixture, where)
    if config.latent is not None:
        check_latent(config.latent, config, where)
    check_recurrent(config, where)
    tables = (config.inv_freq, config.long_inv_freq, config.local_inv_freq)
    _check_activation(config, where)
    if len(config.windows) not in (0, config.layers) or any(type(w) is not int or w < 0 for w in config.windows):
        raise ModelError(f"{where}: sliding windows must be one whole number per layer")
    check_heads(config, where)
    if type(config.original_context) is not int or not 0 <= config.original_context <= _LIMITS["context"]:
        raise ModelError(f"{where}: original_context is {config.original_context!r}; a whole number is expected")
    if config.query_growth and not config.original_context:
        raise ModelError(f"{where}: query_growth is {config.query_growth}, which needs original_context, but that is 0")
    numbers = [config.query_growth, config.norm_eps, config.attention_scale, config.rope_scale, config.local_rope_scale,
               config.embed_scale, config.logit_scale, config.attention_softcap, config.logit_softcap,
               config.activation_threshold, config.activation_slope, config.attention_clip, config.post_norm_eps or 0.0,
               *(value for table in tables for value in table)]  # fmt: skip
    if any(not isinstance(number, int | float) or not math.isfinite(number) for number in numbers):
        raise ModelError(f"{where}: a number is missing or not finite")


def check_heads(config: ModelConfig, where: str) -> None:
    """Check the heads of the layers without a window, and that rotary frequencies fit the heads of their layers.

    Raises:
        ModelError: if a check fails.
    """
    if (full := config.full_heads) is not None:
        for name in ("kv_heads", "head_dim"):
            value = getattr(full, name)
            if type(value) is not int or not 1 <= value <= _LIMITS[name]:
                raise ModelError(f"{where}: {name} of full layers is {value!r}; 1 to {_LIMITS[name]} is expected")
        if config.heads % full.kv_heads:
            raise ModelError(f"{where}: {config.heads} query heads are not a multiple of {full.kv_heads} KV heads")
        if not any(config.windows) or all(config.windows) or config.latent is not None:
            raise ModelError(
                f"{where}: separate heads for layers without a window need layers of both kinds, and no latent"
            )
    _check_shared(config, where)
    if len(config.rope_kinds) not in (0, config.layers) or any(kind not in (0, 1, 2) for kind in config.rope_kinds):
        raise ModelError(f"{where}: kinds of rotary embedding must be 0, 1 or 2 for each layer")
    kinds = config.rope_kinds or (1,) * config.layers
    for layer, kind in enumerate(kinds):
        size = config.at_layer(layer).head_dim
        tables = ((), (config.inv_freq, config.long_inv_freq), (config.local_inv_freq,))[kind]
        if any(2 * len(table) > size for table in tables):
            raise ModelError(f"{where}: rotary embedding is wider than a head of {size}")


def _check_shared(config: ModelConfig, where: str) -> None:
    """Check the fields about layers that use the keys and values of earlier layers, and about per-layer embeddings.

    Raises:
        ModelError: if a check fails; the message begins with `where`.
    """
    own = config.layers - config.shared_kv
    if type(config.shared_kv) is not int or not 0 < own <= config.layers:
        raise ModelError(f"{where}: {config.shared_kv!r} of its layers cannot use the keys and values of earlier ones")
    windows = [bool(config.window(layer)) for layer in range(config.layers)]
    if config.shared_kv and (config.latent is not None or config.recurrent or not {*windows} <= {*windows[:own]}):
        raise ModelError(
            f"{where}: layers use the keys and values of earlier ones, but no earlier one of their kind has any"
        )
    if config.wide_ffn and (not config.shared_kv or config.intermediate % FFN_UNIT):
        raise ModelError(
            f"{where}: layers with twice {config.intermediate} neurons need shared keys and values, and a number of "
            f"neurons that is a multiple of {FFN_UNIT}"
        )
    if type(config.per_layer) is not int or not 0 <= config.per_layer_values <= 1 << 24:
        raise ModelError(
            f"{where}: per_layer is {config.per_layer!r}; a whole number from 0 is expected, which makes at most "
            f"{1 << 24} values in all layers together"
        )


def _check_activation(config: ModelConfig, where: str) -> None:
    if config.activation in ("drelu", "swiglu_clamped") and not config.gated:
        raise ModelError(f"{where}: activation {config.activation!r} needs gate and up, but the model has no gate")
    if config.activation == "swiglu_clamped" and not config.activation_threshold > 0:
        raise ModelError(f"{where}: the limit of its activation is {config.activation_threshold}; it must be positive")


def check_mixture(mixture: Mixture, where: str) -> None:
    """Check that the settings of experts are in range and consistent. `where` names the source in messages.

    Raises:
        ModelError: if a check fails; the message names the field.
    """
    sizes = {"experts": 1 << 12, "used": mixture.experts, "width": 1 << 20, "groups": mixture.experts,
             "groups_used": mixture.groups}  # fmt: skip
    for name, limit in sizes.items():
        value = getattr(mixture, name)
        if type(value) is not int or not 1 <= value <= limit:
            raise ModelError(
                f"{where}: {name} of its experts is {value!r}; a whole number from 1 to {limit} is expected"
            )
    if type(mixture.shared) is not int or not 0 <= mixture.shared <= 1 << 20:
        raise ModelError(f"{where}: its shared experts have {mixture.shared!r} neurons; a whole number is expected")
    each = mixture.experts // mixture.groups
    chosen = each * mixture.groups_used
    if mixture.experts % mixture.groups or not 1 <= mixture.group_best <= each or chosen < mixture.used:
        raise ModelError(f"{where}: {mixture.used} of {mixture.experts} experts cannot be chosen by their groups")
    scaled = isinstance(mixture.scale, int | float) and math.isfinite(mixture.scale)
    if mixture.scores not in get_args(Scores) or not scaled or type(mixture.normalised) is not bool:
        raise ModelError(
            f"{where}: experts with the scores {mixture.scores!r} times {mixture.scale!r} are not supported"
        )


def check_recurrent(config: ModelConfig, where: str) -> None:
    """Check that the settings of recurrent layers are in range, and are present exactly if the model has such layers.

    Raises:
        ModelError: if a check fails; the message names the field.
    """
    if len(config.recurrent) not in (0, config.layers) or any(kind not in (0, 1) for kind in config.recurrent):
        raise ModelError(f"{where}: recurrent layers must be 0 or 1 for each layer")
    settings = [config.delta is not None, config.mamba is not None, config.conv_taps != 0]
    if sum(settings) != any(config.recurrent):
        raise ModelError(f"{where}: its recurrent layers need settings of their kind, and of no other")
    if not config.recurrent:
        return
    if all(config.recurrent):
        raise ModelError(f"{where}: models in which no layer has attention are not supported")
    if config.state_heads is None:
        if type(config.conv_taps) is not int or not 2 <= config.conv_taps <= _MOST_TAPS:
            raise ModelError(
                f"{where}: taps of its convolutions are {config.conv_taps!r}; a whole number from 2 to {_MOST_TAPS} is "
                "expected"
            )
        return
    _check_state_heads(config.state_heads, where)


def _check_state_heads(heads: Delta | Mamba, where: str) -> None:
    kind = "Mamba2" if isinstance(heads, Mamba) else "DeltaNet"
    limits = {"heads": 1 << 12, "key_heads": 1 << 12, "key": 1 << 10, "value": 1 << 10, "taps": _MOST_TAPS}
    for name, limit in limits.items():
        value, least = getattr(heads, name), 2 if name == "taps" else 1
        if type(value) is not int or not least <= value <= limit:
            raise ModelError(
                f"{where}: {name} of its {kind} layers is {value!r}; a whole number from {least} to {limit} is expected"
            )
    if heads.heads % heads.key_heads:
        raise ModelError(f"{where}: {heads.heads} value heads are not a multiple of {heads.key_heads} key heads")
    for name in ("norm_eps", "least_step", "most_step") if isinstance(heads, Mamba) else ():
        value = getattr(heads, name)
        if not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise ModelError(f"{where}: {name} of its {kind} layers is {value!r}; a number from 0 on is expected")


def check_latent(latent: Latent, config: ModelConfig, where: str) -> None:
    """Check that the settings of multi-head latent attention are in range and fit the other fields.

    Raises:
        ModelError: if a check fails; the message names the field.
    """
    sizes = {"rank": 1 << 15, "rope": config.head_dim - 1, "value": config.head_dim}
    for name, limit in sizes.items():
        value = getattr(latent, name)
        if type(value) is not int or not 1 <= value <= limit:
            raise ModelError(
                f"{where}: {name} of its latent attention is {value!r}; a whole number from 1 to {limit} is expected"
            )
    if type(latent.query_rank) is not int or not 0 <= latent.query_rank <= sizes["rank"]:
        raise ModelError(
            f"{where}: its latent queries have {latent.query_rank!r} values; a whole number from 0 to "
            f"{sizes['rank']} is expected"
        )
    if latent.rope != 2 * len(config.inv_freq) or config.rope_kinds:
        raise ModelError(f"{where}: heads of {config.head_dim} values do not fit a shared key of {latent.rope} values")
    if config.kv_heads != config.heads or config.whole_norms or config.attention_clip:
        raise ModelError(f"{where}: head norms, clipping or groups of heads cannot be combined with keys from a latent")
    if not isinstance(latent.norm_eps, int | float) or not math.isfinite(latent.norm_eps):
        raise ModelError(
            f"{where}: the epsilon of the norm of its latent keys is {latent.norm_eps!r}; a number is expected"
        )
