"""Random configurations of every family, run by transformers and by TPI: equal logits, or a refusal.

A draw is a config.json whose fields have random values, are absent or null; a file of random weights for it, sometimes
with a superfluous tensor or field; and a few tokens. `Tally` counts the outcomes of the draws.
"""

import json
import os
import random
import shutil
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from tests.support.differential import (
    conv_draws,
    delta_draws,
    entry_draws,
    expert_draws,
    gemma4_draws,
    nested_draws,
    stand_ins,
    wrapped_draws,
)
from tests.support.differential.expert_draws import stored
from tests.support.differential.rope_draws import Value, fit, one_of, phi3_rope, rope
from tests.support.differential.stand_ins import STAND_INS
from tests.support.weights.split import F32, split_forward
from tpi.errors import ModelError, PlanError
from tpi.families.table import FAMILIES
from tpi.pack.builder.build import open_source, pack_model
from tpi.pack.reader import Pack

TOLERANCE = 1e-4  # of the largest logit
OTHER_SPELLINGS = ("ExaoneMoEForCausalLM",)  # of architectures that are drawn
ARCHITECTURES = tuple(name for family in FAMILIES for name in family.architectures if name not in OTHER_SPELLINGS)
LAYERS = 3  # at most, unless the number of layers is absent: lists per layer are drawn for the number that is there


def kinds(rng: random.Random) -> list[str]:
    return [rng.choice(["full_attention", "sliding_attention"]) for _ in range(LAYERS)]


_IDS = one_of(0, 3, 30)
_RATE = one_of(0.0, 0.5)
# What each field may be; the first is where it stands if it does not vary (ABSENT: it is not there).
ABSENT = object()
PLAIN: dict[str, Any] = {
    "vocab_size": 40, "hidden_size": 32, "intermediate_size": 40, "ffn_dim": 40, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
    "pad_token_id": 0,
}  # fmt: skip
for own in (expert_draws, delta_draws, gemma4_draws, entry_draws, conv_draws, nested_draws):
    PLAIN |= own.PLAIN
VALUES: dict[str, Value] = {
    "vocab_size": one_of(33, 64), "hidden_size": one_of(64, 96), "intermediate_size": one_of(32, 72),
    "ffn_dim": one_of(32, 72), "num_hidden_layers": one_of(1, 3), "num_attention_heads": one_of(2, 8),
    "num_key_value_heads": one_of(1, 1, None), "head_dim": one_of(4, 16), "max_position_embeddings": one_of(48, 128),
    "hidden_act": one_of("silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "swish", "gelu_fast", "relu2"),
    "norm_eps": one_of(1e-6, 1e-2, 0.5), "layer_norm_epsilon": one_of(1e-6, 1e-2, 0.5),
    "num_ln_in_parallel_attn": one_of(1, 2, None), "num_kv_heads": one_of(1, 2, 4, None), "alibi": one_of(False),
    "new_decoder_architecture": one_of(True, True, False), "multi_query": one_of(True, False),
    "parallel_attn": one_of(True, True, False), "bias": one_of(False, False, True), "ffn_hidden_size": one_of(32, 72),
    "activation": one_of("relu", "gelu", "silu", "relu2"), "hidden_dropout": _RATE,
    "hidden_activation": one_of("silu", "gelu", "gelu_pytorch_tanh", "relu"),
    "activation_function": one_of("relu", "gelu", "silu"),
    "rms_norm_eps": one_of(1e-6, 1e-5, 1e-2, 0.5), "tie_word_embeddings": one_of(True, False),
    "attention_bias": one_of(True, False), "mlp_bias": one_of(True, False), "enable_bias": one_of(True, False),
    "rope_parameters": rope, "sliding_window": one_of(4, 7, 100, None), "layer_types": kinds,
    "use_sliding_window": one_of(True, True, False), "max_window_layers": one_of(0, 1, 9),
    "original_max_position_embeddings": one_of(8, 16, 40), "query_pre_attn_scalar": one_of(4, 24, 144),
    "final_logit_softcapping": one_of(None, 0.5, 4.0), "attn_logit_softcapping": one_of(None, 0.5, 4.0),
    "use_bidirectional_attention": one_of(False, None),
    "no_rope_layers": lambda rng: [rng.choice([0, 1]) for _ in range(LAYERS)],
    "no_rope_layer_interval": one_of(1, 2, 3), "embedding_multiplier": one_of(0.5, 12),
    "logits_scaling": one_of(0.25, 8.0, 3), "residual_multiplier": one_of(0.22, 1.5),
    "attention_multiplier": one_of(0.1, 0.5), "do_layer_norm_before": one_of(True),
    "_remove_final_layer_norm": one_of(False), "word_embed_proj_dim": one_of(None, 32),
    "layer_norm_elementwise_affine": one_of(True), "pretraining_tp": one_of(1, 2),
    "initializer_range": one_of(0.02, 0.5), "init_std": one_of(0.02, 0.5), "use_cache": one_of(True, False),
    "bos_token_id": _IDS, "eos_token_id": one_of(0, [2, 3]), "pad_token_id": one_of(3, 30, None),
    "attention_dropout": _RATE, "dropout": _RATE, "layerdrop": _RATE, "resid_pdrop": _RATE, "embd_pdrop": _RATE,
}  # fmt: skip
VALUES |= expert_draws.values(one_of) | nested_draws.values(one_of)
_FURTHER = wrapped_draws.CHOICES | delta_draws.CHOICES | gemma4_draws.CHOICES | entry_draws.CHOICES | conv_draws.CHOICES
VALUES |= {name: one_of(*choices) for name, choices in _FURTHER.items()}
BAD: dict[str, Value] = {
    "hidden_act": one_of("tanh", "quick_gelu"), "hidden_activation": one_of("tanh", None),
    "activation_function": one_of("tanh"), "do_layer_norm_before": one_of(False),
    "_remove_final_layer_norm": one_of(True), "word_embed_proj_dim": one_of(16),
    "layer_norm_elementwise_affine": one_of(False), "use_bidirectional_attention": one_of(True),
    "num_attention_heads": one_of(3), "num_key_value_heads": one_of(3), "sliding_window": one_of(0, 1),
    "layer_types": one_of(["full_attention"], ["chunked_attention"] * LAYERS), "rope_parameters": one_of(
        {"rope_type": "proportional", "partial_rotary_factor": 0.5}, {"full_attention": {"rope_type": "default"}},
        {"rope_type": "linear"}, {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}),
    "head_dim": one_of(5, 0), "hidden_size": one_of(30), "rms_norm_eps": one_of(0.0, -1.0),
}  # fmt: skip
# Fields that the classes do not have, which files have all the same: some count, some do not.
STRAY: dict[str, Value] = {
    "rope_scaling": lambda rng: rng.choice([None, rope(rng), rope(rng)]), "rope_theta": one_of(100, 10000.0, 1e6),
    "partial_rotary_factor": one_of(0.5, 1.0, None), "original_max_position_embeddings": one_of(8, 16),
    "head_dim": one_of(4, 16), "attention_bias": one_of(True, False), "mlp_bias": one_of(True, False),
    "sliding_window": one_of(4), "layer_types": kinds, "attn_logit_softcapping": one_of(1.0),
    "final_logit_softcapping": one_of(1.0), "sliding_window_pattern": one_of(1, 2, 3), "rope_local_base_freq":
    one_of(100.0), "is_causal": one_of(True, False), "logits_scaling": one_of(3.0), "unheard_of": one_of(1, None),
    "temperature": one_of(0.5), "is_decoder": one_of(True),
}  # fmt: skip
HEADS = dict.fromkeys(nested_draws.NESTED, ("d_model", "n_heads"))  # other names of what a head's size comes from
OLDER = ("rope_scaling", "rope_theta", "original_max_position_embeddings")
NESTED: Value = lambda rng: {kind: rope(rng) for kind in ("full_attention", "sliding_attention")}  # noqa: E731


@dataclass(frozen=True)
class Draw:
    """One configuration; `varied` names its fields that do not have their usual value."""

    architecture: str
    fields: dict[str, Any]
    varied: frozenset[str]
    extra: str  # a change to the file: see `_weights`
    seed: int


@dataclass
class Tally:
    """Counts of the draws by outcome. `wrong` has a description of each disagreement, and must stay empty."""

    ran: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    invalid: Counter[str] = field(default_factory=Counter)  # transformers itself raises, or its logits are not finite
    varied: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        names = [f"{name} {self.ran[name]}/{self.refused[name]}/{self.invalid[name]}" for name in ARCHITECTURES]
        rare = ", ".join(f"{name} {count}" for name, count in sorted(self.varied.items(), key=lambda item: item[1])[:9])
        return f"ran/refused/invalid: {'; '.join(names)}. Least varied: {rare}. Wrong: {self.wrong}"


def class_fields(architecture: str) -> dict[str, Any]:
    """Return the fields of the family's config class that not all classes have, with their defaults."""
    from dataclasses import fields as fields_of

    from transformers import PreTrainedConfig

    common = {item.name for item in fields_of(PreTrainedConfig)}
    return {item.name: item.default for item in fields_of(config_class(architecture)) if item.name not in common}


def config_class(architecture: str) -> Any:
    """Return the config class of transformers whose fields are drawn."""
    found = model_class(architecture).config_class
    return found.sub_configs["text_config"] if architecture in wrapped_draws.WRAPPED else found


def model_class(architecture: str) -> Any:
    """Return the model class of transformers, or its stand-in."""
    import transformers

    return getattr(transformers, STAND_INS.get(architecture, architecture))


def draw(architecture: str, seed: int) -> Draw:
    rng = random.Random(f"{architecture} {seed}")
    found: dict[str, Any] = {"architectures": [architecture]}
    varied = set()
    for name in class_fields(architecture):
        plain, chance = PLAIN.get(name, ABSENT), rng.random()
        if chance < 0.005:
            value = BAD[name](rng) if name in BAD and rng.random() < 0.6 else None  # null
        elif chance < 0.02 and plain is not ABSENT:
            value = ABSENT
        else:
            value = VALUES[name](rng) if rng.random() < _lively(name) else plain
        if value is not ABSENT:
            found[name] = value
        if value is not plain:
            varied.add(name)
    _settle(architecture, found, rng)
    if architecture in nested_draws.NESTED:
        varied |= nested_draws.inside(found)
    extra = rng.choice(EXTRAS) if rng.random() < 0.15 else ""
    found = wrapped_draws.wrapped(architecture, found) if architecture in wrapped_draws.WRAPPED else found
    return Draw(architecture, found, frozenset(varied), extra, seed)


def has_rare_fields(architecture: str) -> bool:
    """Return True if some field belongs to at most three architectures, so that only their draws test the field."""
    return not _rare_fields(3).isdisjoint(class_fields(architecture))


@cache
def _rare_fields(most: int) -> frozenset[str]:
    """Return the fields that at most so many architectures have."""
    seen = Counter(name for architecture in ARCHITECTURES for name in class_fields(architecture))
    return frozenset(name for name, architectures in seen.items() if architectures <= most)


def _lively(name: str) -> float:
    """Return the probability with which a field varies.

    It is low for fields of all families, since many changes at once seldom give a valid model. It is higher for fields
    of one family, since few runs test them.
    """
    if name in _rare_fields(1):
        return 0.97
    common = ("hidden_size", "vocab_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim",
              "num_key_value_heads", "max_position_embeddings", "layer_types", "rope_parameters")  # fmt: skip
    return 0.6 if name == "rope_parameters" else 0.3 if name in common else 0.8


def _settle(architecture: str, found: dict[str, Any], rng: random.Random) -> None:
    """Give lists an entry for each layer, and add some stray fields."""
    if architecture in ("Gemma3ForCausalLM", "Olmo3ForCausalLM") and found.get("rope_parameters"):
        found["rope_parameters"] = NESTED(rng)
    if architecture == "FalconForCausalLM":
        _settle_falcon(found, rng)
    expert_draws.settle(architecture, found, rng)
    stand_ins.settle(architecture, found, rng)
    delta_draws.settle(architecture, found, LAYERS, rng)
    gemma4_draws.settle(architecture, found, LAYERS, rng)
    entry_draws.settle(architecture, found, LAYERS, rng)
    conv_draws.settle(architecture, found, LAYERS, rng)
    if architecture == "Phi3ForCausalLM" and found.get("rope_parameters"):
        found["rope_parameters"] = phi3_rope(rng)
    if rng.random() < 0.25:
        name = rng.choice(list(STRAY))
        found.setdefault(name, STRAY[name](rng))
    if "rope_parameters" in class_fields(architecture):
        older = (name for name in OLDER if rng.random() < 0.12)
        found.update({name: STRAY[name](rng) for name in older if name not in found})
    if architecture in nested_draws.NESTED:
        nested_draws.settle(found, rng)
    if architecture in wrapped_draws.WRAPPED:
        wrapped_draws.settle(found, rng)
    hidden, heads = (found.get(name) for name in HEADS.get(architecture, ("hidden_size", "num_attention_heads")))
    size = found.get("head_dim") or (hidden or 4096) // (heads or 32)
    if rng.random() < 0.95 and isinstance(size, int):
        fit({name: value for name, value in found.items() if name.startswith("rope_")}, size)
    layers = found.get("num_hidden_layers")
    for name in ("layer_types", "no_rope_layers"):
        if isinstance(found.get(name), list) and len(found[name]) == LAYERS and isinstance(layers, int):
            found[name] = found[name][:layers]


def _settle_falcon(found: dict[str, Any], rng: random.Random) -> None:
    """Set mostly fields about heads, norms and blocks that fit together, since the class raises otherwise."""
    if rng.random() < 0.1:
        return
    newer = found.get("new_decoder_architecture", False)
    found["parallel_attn"] = newer or found.get("parallel_attn", True)
    if not newer:
        found["num_ln_in_parallel_attn"] = None
    if not newer and not found.get("multi_query", True):
        found["num_kv_heads"] = None
    if found["parallel_attn"]:
        found["bias"] = False


TABLES = ("embed_tokens.weight", "word_embeddings.weight", "wte.weight", ".embeddings.weight")
EXTRAS = ("own head", "stray bias", "unknown", "no bias", "rotary")


def _weights(extra: str, state: Mapping[str, Any], rng: np.random.Generator) -> dict[str, F32]:
    """Return the tensors of the file: the model's own, with one more or one less as `extra` says."""
    found = {name: tensor.numpy() for name, tensor in state.items()}
    table = next(name for name in found if name.endswith(TABLES))
    matrix = next(
        name for name in found if name.endswith(("o_proj.weight", "out_proj.weight", "attention.dense.weight"))
    )
    if extra == "own head":
        found["lm_head.weight"] = rng.standard_normal(found[table].shape).astype(np.float32) * np.float32(0.3)
    if extra == "stray bias":
        found[matrix.replace("weight", "bias")] = rng.standard_normal(len(found[matrix])).astype(np.float32)
    if extra == "no bias":
        found.pop(matrix.replace("weight", "bias"), None)
    if extra == "unknown":
        found[matrix.replace("weight", "sinks")] = np.ones(4, np.float32)
    if extra == "rotary":
        found["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    return found


def compare(drawn: Draw, directory: Path, tally: Tally) -> None:
    """Run one draw in transformers and in TPI, compare the logits, and count the outcome in `tally`."""
    rng = np.random.default_rng(drawn.seed)
    expected = _reference(drawn, directory, rng)
    name = drawn.architecture
    if expected is None:
        tally.invalid[name] += 1
        return
    tokens, wanted = expected
    try:
        pack_model(open_source(directory), "f32", directory / "pack")
        pack = Pack.open(directory / "pack")
        got = _answer(pack, tokens, (0.6, 0.4) if drawn.seed % 3 == 0 else (1.0,))
    except ModelError as error:
        tally.refused[name] += 1
        tally.reasons[str(error).replace(str(directory), "")[:90]] += 1
        return
    error_found = float(np.abs(got - wanted).max() / np.abs(wanted).max())
    if not error_found < TOLERANCE:
        tally.wrong.append(f"{name} seed {drawn.seed} {drawn.extra}: error {error_found:.2g} of {drawn.fields}")
    tally.ran[name] += 1
    tally.varied.update(drawn.varied)


def _answer(pack: Pack, tokens: list[int], shares: Sequence[float]) -> F32:
    try:
        return split_forward(pack, tokens, shares, steps=3)
    except PlanError:  # too few units to share
        return split_forward(pack, tokens, (1.0,), steps=3)


def _reference(drawn: Draw, directory: Path, rng: np.random.Generator) -> tuple[list[int], F32] | None:
    """Return tokens and the logits of transformers; None if it raises or the logits are not finite."""
    import torch

    try:
        model = _made(drawn, directory, rng)
        tokens = [int(token) for token in rng.integers(0, model.config.get_text_config().vocab_size, 20)]
        with torch.no_grad():
            logits = model(torch.tensor([tokens]), use_cache=False).logits[0].numpy()
    except Exception:  # noqa: BLE001 - whatever a random configuration may raise there
        return None
    (directory / "config.json").write_text(json.dumps(drawn.fields))
    return (tokens, logits) if np.isfinite(logits).all() and np.ptp(logits) > 0 else None


def _made(drawn: Draw, directory: Path, rng: np.random.Generator) -> Any:
    """Return the model in transformers; write its weights to a file in `directory`."""
    from safetensors.numpy import save_file

    cls, fields = model_class(drawn.architecture), _for_transformers(drawn)
    config = cls.config_class.from_dict(json.loads(json.dumps(fields)))
    config._attn_implementation = "eager"
    model = cls(config).eval()
    _randomise(model, rng)
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(fields))
    tied = {"lm_head.weight"} if config.tie_word_embeddings and model._tied_weights_keys else set()
    routed = hasattr(config, "num_experts_per_tok")
    held = stored(model, directory / "stored") if routed else model.state_dict()
    state = {name: tensor for name, tensor in held.items() if name not in tied}
    save_file(_weights(drawn.extra, state, rng), directory / "model.safetensors", {"format": "pt"})
    if drawn.extra:
        model = cls.from_pretrained(directory, attn_implementation="eager")
    if drawn.architecture in STAND_INS:
        stand_ins.adapt(model, drawn.architecture, drawn.fields)
    return model.eval()


def _for_transformers(drawn: Draw) -> dict[str, Any]:
    """Return the configuration from which transformers makes the model that the file describes."""
    if drawn.architecture in nested_draws.NESTED:
        return nested_draws.for_transformers(drawn.fields)
    return stand_ins.for_transformers(drawn.fields) if drawn.architecture in STAND_INS else drawn.fields


def _randomise(model: Any, rng: np.random.Generator) -> None:
    """Set random weights: matrices that preserve the size of activations, vectors near their present values."""
    import torch

    with torch.no_grad():
        for parameter in model.parameters():
            values = torch.from_numpy(rng.standard_normal(tuple(parameter.shape)).astype(np.float32))
            if parameter.dim() > 1:
                parameter.copy_(values * parameter.shape[-1] ** -0.5)
            else:
                parameter.add_(values * 0.1)
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.copy_(torch.from_numpy(rng.random(tuple(buffer.shape), np.float32) * np.float32(0.3)))
            if name.endswith("layer_scalar"):
                buffer.fill_(0.2 + rng.random())


def run(draws: Mapping[str, int], directory: Path) -> Tally:
    """Return the tally of so many `draws` of each architecture. `directory` holds one draw's files at a time."""
    import torch
    import transformers

    torch.set_num_threads(1)  # tiny matrices: more threads only wait for each other
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    transformers.logging.disable_progress_bar()
    tally = Tally()
    with patch.object(os, "fsync"):  # thousands of packs that need not survive a power cut
        for architecture, number in draws.items():
            for seed in range(number):
                target = directory / f"{architecture}-{seed}"
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    compare(draw(architecture, seed), target, tally)
                shutil.rmtree(target, ignore_errors=True)
    return tally
