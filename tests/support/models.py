"""Tiny random models of every family, made with transformers, their tokenizer, and a simple way to run a pack."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.support import entries
from tests.support.segments import compute
from tests.support.weights.layerends import end_block, layer_embeddings
from tpi.block import Joining, embedded, join, joining, recurrent_spec
from tpi.config import RECURRENT as RECURRENT_KINDS
from tpi.config import ModelConfig
from tpi.devices.host import HostDevice
from tpi.kernels import Kernels, open_kernels
from tpi.kernels.kv import KvPages, pages_for
from tpi.kernels.spec import Batch, NormSpec
from tpi.pack.layout import RunLayout
from tpi.pack.reader import Pack, PackBlock
from tpi.partition import Range
from worker.node.segment import Segment, open_segment

F32 = npt.NDArray[np.float32]

VOCAB = 320
TOKENS = [1, 17, 300, 42, 42, 7, 250, 9, 88, 123, 5, 61, 2, 319, 33, 71, 28, 100, 3, 4]
SIZES: dict[str, Any] = {
    "hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 3,
    "intermediate_size": 160, "vocab_size": VOCAB, "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
LATENT: dict[str, Any] = SIZES | {
    "num_key_value_heads": SIZES["num_attention_heads"], "q_lora_rank": None, "kv_lora_rank": 64,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 24, "v_head_dim": 16, "n_routed_experts": 8, "num_experts_per_tok": 3,
    "moe_intermediate_size": 100, "n_shared_experts": 2, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5,
}  # fmt: skip
LATENT_OF_QUERIES = 32  # `q_lora_rank` of the models that have one
DELTA: dict[str, Any] = {
    "linear_num_value_heads": 6, "linear_num_key_heads": 2, "linear_key_head_dim": 20, "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4, "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
GEMMA4: dict[str, Any] = {
    "head_dim": 16, "global_head_dim": 32, "num_global_key_value_heads": 2, "attention_k_eq_v": True,
    "sliding_window": 12, "final_logit_softcapping": 4.0, "hidden_size_per_layer_input": 0,
    "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip
MAMBA: dict[str, Any] = {
    "mamba_n_heads": 6, "mamba_d_state": 20, "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
NEMOTRON: dict[str, Any] = {name: size for name, size in SIZES.items() if name != "num_hidden_layers"} | {
    "head_dim": 32, "mamba_num_heads": 6, "mamba_head_dim": 32, "ssm_state_size": 20, "time_step_min": 0.3,
}  # fmt: skip
GEMMA4_E: dict[str, Any] = SIZES | GEMMA4 | {
    "attention_k_eq_v": False, "num_global_key_value_heads": None, "num_hidden_layers": 5, "num_kv_shared_layers": 3,
    "hidden_size_per_layer_input": 40, "vocab_size_per_layer_input": VOCAB, "use_double_wide_mlp": True,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "full_attention"],
    "intermediate_size": 160,
}  # fmt: skip
CONV_ROPE = {"rope_type": "default", "rope_theta": 1000000.0}
_YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64, "mscale": 0.5,
    "mscale_all_dim": 0.5,
}  # fmt: skip
TEXT = ("The capital of France is Paris. A laptop in every room runs one part of the model, and the sum is the answer. "
        "Numbers such as 123 and 2048, names, and punctuation: all of it is text! ") * 4  # fmt: skip
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<pad>", "<|im_start|>", "<|im_end|>")


@dataclass(frozen=True)
class TinyModel:
    """A model in a Hugging Face directory, and the same model in transformers."""

    directory: Path
    reference: Any  # a transformers model in evaluation mode, float32


def _configs() -> dict[str, Callable[[], Any]]:
    import transformers

    odd = SIZES | {"intermediate_size": 150}  # not a multiple of 32
    opt = {key: value for key, value in SIZES.items() if key not in ("intermediate_size", "num_key_value_heads")}
    return {
        "llama": lambda: transformers.LlamaConfig(**SIZES),
        "llama3": lambda: transformers.LlamaConfig(**odd, rope_parameters=LLAMA3, tie_word_embeddings=True),
        "mistral": lambda: transformers.MistralConfig(**SIZES, sliding_window=12),
        "qwen2": lambda: transformers.Qwen2Config(
            **SIZES, use_sliding_window=True, sliding_window=12, max_window_layers=1, tie_word_embeddings=True
        ),
        "qwen3": lambda: transformers.Qwen3Config(**odd, head_dim=32),
        "opt": lambda: transformers.OPTConfig(**opt, ffn_dim=150, word_embed_proj_dim=96),
        "phi3": lambda: transformers.Phi3Config(**SIZES),
        "gemma2": lambda: transformers.Gemma2Config(
            **SIZES, head_dim=32, query_pre_attn_scalar=24, sliding_window=12, attn_logit_softcapping=5.0,
            final_logit_softcapping=4.0,
        ),
        "gemma3": lambda: transformers.Gemma3TextConfig(
            **SIZES, head_dim=32, query_pre_attn_scalar=24, sliding_window=12, sliding_window_pattern=2,
            rope_parameters={
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        ),
        "gemma4": lambda: transformers.Gemma4TextConfig(**SIZES, **GEMMA4),
        "gemma4e": lambda: transformers.Gemma4TextConfig(**GEMMA4_E),
        "gemma4staged": lambda: transformers.Gemma4TextConfig(
            **GEMMA4_E | {"num_hidden_layers": 6, "layer_types": ["sliding_attention", *GEMMA4_E["layer_types"]]},
        ),
        "gemma4moe": lambda: transformers.Gemma4TextConfig(
            **SIZES, **GEMMA4, enable_moe_block=True, num_experts=5, top_k_experts=2, moe_intermediate_size=100,
        ),
        "smollm3": lambda: transformers.SmolLM3Config(**SIZES, no_rope_layer_interval=2),
        "granite": lambda: transformers.GraniteConfig(
            **SIZES, embedding_multiplier=12.0, logits_scaling=8.0, residual_multiplier=0.22, attention_multiplier=0.1,
        ),
    } | _mixtures() | entries.configs(SIZES)  # fmt: skip


def _mixtures() -> dict[str, Callable[[], Any]]:
    """Return configurations of families with experts, whose neurons do not fill whole units."""
    import transformers

    odd = SIZES | {"intermediate_size": 100}
    dbrx = {
        "d_model": 96, "n_heads": 6, "n_layers": 2, "vocab_size": VOCAB, "max_seq_len": 256, "pad_token_id": 0,
        "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    return {
        "mixtral": lambda: transformers.MixtralConfig(**odd, num_local_experts=5, num_experts_per_tok=2),
        "qwen2moe": lambda: transformers.Qwen2MoeConfig(
            **SIZES, num_experts=5, num_experts_per_tok=2, moe_intermediate_size=100,
            shared_expert_intermediate_size=172, mlp_only_layers=[0],
        ),
        "qwen3moe": lambda: transformers.Qwen3MoeConfig(
            **SIZES, head_dim=32, num_experts=8, num_experts_per_tok=3, moe_intermediate_size=100, norm_topk_prob=True,
        ),
        "granitemoe": lambda: transformers.GraniteMoeConfig(
            **odd, num_local_experts=5, embedding_multiplier=12.0, logits_scaling=4.0, residual_multiplier=0.22,
            attention_multiplier=0.1,
        ),
        "olmoe": lambda: transformers.OlmoeConfig(**odd, num_experts=6, num_experts_per_tok=3, clip_qkv=1.5),
        "dbrx": lambda: transformers.DbrxConfig(
            **dbrx, attn_config={"kv_n_heads": 3, "clip_qkv": 0.5, "rope_theta": 500.0},
            rope_parameters={"rope_type": "default", "rope_theta": 500.0},
            ffn_config={"ffn_hidden_size": 100, "moe_num_experts": 5, "moe_top_k": 2},
        ),
        "deepseek2": lambda: transformers.DeepseekV2Config(**LATENT, topk_method="greedy", rope_parameters=_YARN),
        "deepseek3": lambda: transformers.DeepseekV3Config(
            **LATENT | {"q_lora_rank": LATENT_OF_QUERIES}, n_group=4, topk_group=2, norm_topk_prob=True,
        ),
        "glm4moelite": lambda: transformers.Glm4MoeLiteConfig(
            **{name: value for name, value in LATENT.items() if name != "first_k_dense_replace"}
            | {"q_lora_rank": LATENT_OF_QUERIES, "v_head_dim": 32, "rms_norm_eps": 1e-6},
        ),
        "qwen35": lambda: transformers.Qwen3_5TextConfig(**SIZES, **DELTA, head_dim=32),
        "qwen35moe": lambda: transformers.Qwen3_5MoeTextConfig(
            **odd, **DELTA, head_dim=32, num_experts=5, num_experts_per_tok=2, moe_intermediate_size=100,
            shared_expert_intermediate_size=172,
        ),
        "qwen3next": lambda: transformers.Qwen3NextConfig(
            **SIZES, **DELTA, head_dim=32, num_experts=5, num_experts_per_tok=2, moe_intermediate_size=100,
            shared_expert_intermediate_size=172, mlp_only_layers=[0], norm_topk_prob=True,
        ),
        "lfm2": lambda: transformers.Lfm2Config(
            **SIZES, layer_types=["conv", "full_attention"], block_multiple_of=32, rope_parameters=CONV_ROPE,
        ),
        "lfm3": lambda: transformers.Lfm3Config(
            **SIZES | {"num_hidden_layers": 3}, head_dim=16, sliding_window=12,
            layer_types=["conv", "full_attention", "sliding_attention"],
        ),
        "lfm2moe": lambda: transformers.Lfm2MoeConfig(
            **odd, layer_types=["conv", "full_attention"], conv_L_cache=4, num_experts=5, num_experts_per_tok=2,
            moe_intermediate_size=100, num_dense_layers=1, routed_scaling_factor=1.5, rope_parameters=CONV_ROPE,
        ),
        "granite4h": lambda: transformers.GraniteMoeHybridConfig(
            **SIZES, **entries.GRANITE, **MAMBA, mamba_n_groups=3, mamba_d_conv=3, mamba_conv_bias=False,
            num_local_experts=0, shared_intermediate_size=172, position_embedding_type="rope",
        ),
        "granite4hmoe": lambda: transformers.GraniteMoeHybridConfig(
            **odd, **entries.GRANITE, **MAMBA, num_local_experts=5, shared_intermediate_size=172,
        ),
        "nemotronh": lambda: transformers.NemotronHConfig(
            **NEMOTRON, layers_block_type=["linear_attention", "linear_attention", "mlp", "full_attention", "mlp"],
            n_groups=3, mlp_bias=True, use_conv_bias=False,
        ),
        "nemotronhmoe": lambda: transformers.NemotronHConfig(
            **NEMOTRON | {"time_step_min": 1e-9},
            layers_block_type=["linear_attention", "moe", "linear_attention", "full_attention", "moe"],
            n_groups=1, n_routed_experts=6, num_experts_per_tok=2, moe_intermediate_size=100, n_group=2,
            moe_shared_expert_intermediate_size=172, routed_scaling_factor=1.5,
        ),
        "gptoss": lambda: transformers.GptOssConfig(
            **odd, head_dim=32, num_local_experts=5, num_experts_per_tok=2, sliding_window=12,
            rope_parameters={
                "rope_type": "yarn", "rope_theta": 150.0, "factor": 4.0, "original_max_position_embeddings": 64,
            },
        ),
    }  # fmt: skip


_RECURRENT = ("qwen35", "qwen3next", "qwen35moe", "lfm2", "lfm2moe", "lfm3", "granite4h", "granite4hmoe")
NEMOTRONS = ("nemotronh", "nemotronhmoe")  # with layers of one block
RECURRENT = (*_RECURRENT, *NEMOTRONS)
MIXTURES = (
    "mixtral", "qwen2moe", "qwen3moe", "granitemoe", "olmoe", "dbrx", "gptoss", "deepseek2", "deepseek3", "glm4moelite",
)  # fmt: skip
MODELS = (
    "llama", "llama3", "mistral", "qwen2", "qwen3", "opt", "phi3", "gemma2", "gemma3", "smollm3", "granite", *MIXTURES,
    *_RECURRENT, "gemma4", "gemma4moe", *entries.ENTRIES, *NEMOTRONS,
)  # fmt: skip
# models that not every test can run, with seeds whose errors in f32 are small in transformers
OTHERS = {"gemma4e": 41, "gemma4staged": 41}  # the latter can be cut into stages after its first layer


def make_model(
    name: str,
    directory: Path,
    dtype: str = "float32",
    shard: str = "1GB",
    layers: int | None = None,
    heads: tuple[int, int] | None = None,
) -> TinyModel:
    """Write the tiny model `name` (one of `MODELS`) with its tokenizer; `shard` is the largest file, such as 100KB.

    With `layers`, the model has that many layers instead of two: kinds of attention alternate, and all else is as in
    the second layer. `heads` are the numbers of query heads and KV heads, for families that have heads like Llama.
    """
    import torch
    import transformers

    config = _configs()[name]()
    if layers is not None:
        config.num_hidden_layers = layers
        if (kinds := getattr(config, "layer_types", None)) is not None:
            config.layer_types = (kinds * layers)[:layers]
        if (kinds := getattr(config, "mlp_layer_types", None)) is not None:
            config.mlp_layer_types = (kinds + kinds[-1:] * layers)[:layers]
    if heads is not None:
        config.num_attention_heads, config.num_key_value_heads = heads
        config.head_dim = config.hidden_size // heads[0]
    torch.manual_seed(OTHERS[name] if name in OTHERS else MODELS.index(name))
    several = transformers.AutoModelForImageTextToText if config.get_text_config() is not config else None
    classes = several or transformers.AutoModelForCausalLM
    model = classes.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            spread = parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.1
            parameter.copy_(torch.randn_like(parameter) * spread + (0 if parameter.dim() > 1 else parameter))
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.copy_(torch.rand_like(buffer) * 0.3)
            if buffer_name.endswith("layer_scalar"):
                buffer.copy_(torch.rand_like(buffer) + 0.2)
    model = model.to(getattr(torch, dtype))
    model.save_pretrained(directory, max_shard_size=shard)
    write_tokenizer(directory)
    return TinyModel(directory, model.float())


def write_tokenizer(directory: Path) -> None:
    """Write a byte-level BPE tokenizer with chat tokens, trained on `TEXT`, to a Hugging Face directory."""
    import json

    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=list(SPECIAL), initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<pad>", "chat_template": TEMPLATE,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }  # fmt: skip
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


def forward(pack: Pack, tokens: Sequence[int], kernels: Kernels | None = None) -> F32:
    """Return logits `[tokens, vocab]` of a pack on one node, computed with `kernels`, by default the native ones."""
    config, kernels = pack.config.for_context(len(tokens)), kernels or open_kernels()
    x = embedded(config, kernels.gather(*_table(pack.embedding), np.asarray(tokens, np.int32)))
    positions = np.arange(len(tokens), dtype=np.int32)
    if pack.positions:
        x = x + kernels.gather(*_table(pack.positions), positions + np.int32(config.position_offset))
    embeddings = layer_embeddings(pack, tokens, x, kernels)
    blocks = pages_for(len(tokens))
    each = [config.at_layer(layer) for layer in range(config.layers)]
    kv = KvPages.of_layers({at: (own.kv_heads, own.head_dim) for at, own in enumerate(each)}, blocks, "f32")
    batch = Batch(
        positions,
        np.zeros_like(positions),
        np.arange(blocks, dtype=np.int32)[None],
        np.array([[-1, 0, 0, 0]], np.int32),
    )
    before: tuple[Joining, F32] | None = None
    for layer, halves in enumerate(pack.layers):
        for half in halves:
            data = np.concatenate([half.read_units(run.name, 0, run.units).reshape(-1) for run in half.shape.runs])
            part = compute(
                whole(config, layer, half, kv, kernels, _source(pack, layer, half)),
                data,
                np.ascontiguousarray(x),
                batch,
            )
            if how := joining(config, half.kind):
                before = how, part
                continue
            if before is not None:
                part, before = join(before[0], before[1], part), None
            x = end_block(pack, half, layer, kernels, x, part, embeddings)
    return last_logits(pack, x, kernels)


def last_logits(pack: Pack, x: F32, kernels: Kernels) -> F32:
    """Return the logits `[tokens, vocab]` of hidden states after the last layer."""
    config, final = pack.config, pack.final.vectors()
    norm = NormSpec(config.norm, config.norm_eps, final["norm"], final.get("norm.bias"))
    logits = kernels.logits(*_table(pack.head), kernels.norm(norm, x))[:, : config.vocab]
    logits *= np.float32(config.logit_scale)
    return np.tanh(logits / config.logit_softcap) * config.logit_softcap if config.logit_softcap else logits


def _source(pack: Pack, layer: int, block: PackBlock) -> tuple[RunLayout, Range] | None:
    """Return the run of keys and values of another layer that an attention block reads; None if it has its own."""
    if block.kind != "attention" or pack.config.kv_layer(layer) == layer:
        return None
    run = pack.layers[pack.config.kv_layer(layer)][0].run("kv")
    return run, Range(0, run.units)


def reference_logits(model: TinyModel, tokens: list[int]) -> F32:
    """Return the logits of transformers after each of `tokens`, `[tokens, vocab]`."""
    import torch

    with torch.no_grad():
        return np.asarray(model.reference(torch.tensor([tokens])).logits[0].float().numpy())


def _table(block: PackBlock) -> tuple[RunLayout, npt.NDArray[np.uint8]]:
    run = block.run("row")
    return run, block.read_units("row", 0, run.units).reshape(-1)


def whole(
    config: ModelConfig,
    layer: int,
    block: PackBlock,
    pages: KvPages,
    kernels: Kernels,
    source: tuple[RunLayout, Range] | None = None,
) -> Segment:
    """Return a block of a pack as one segment, with one state if recurrent. `source` goes to `open_segment`."""
    runs = [(run, Range(0, run.units)) for run in block.shape.runs]
    states = None
    if block.kind in RECURRENT_KINDS:
        states = np.zeros((1, recurrent_spec(config, runs, block.vectors()).state_values), np.float32)
    return open_segment(HostDevice(kernels), config, layer, runs, block.vectors(), pages, states=states, source=source)
