"""The fields of config.json that each family reads, with their defaults, as in the config classes of transformers.

A test compares these tables with the classes of the installed transformers. TPI does not import transformers when it
runs, since that takes seconds. A field that is in no table is not read: `HARMLESS` lists fields without effect,
`REFUSED` lists fields that would change the answers, and any other field is named in a note to the user.
"""

from collections.abc import Mapping
from typing import Any

from tpi.errors import ModelError
from tpi.families.base import Fields

_SIZES: dict[str, Any] = {
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "max_position_embeddings": 2048, "tie_word_embeddings": False,
}  # fmt: skip
COMMON: dict[str, Any] = _SIZES | {
    "num_key_value_heads": None, "head_dim": None, "hidden_act": "silu", "rms_norm_eps": 1e-6,
    "rope_parameters": None,
    # No longer in the config classes of transformers, but in the files of older models, and still in effect:
    "rope_theta": 10000.0, "rope_scaling": None, "partial_rotary_factor": None,
    "original_max_position_embeddings": None,
}  # fmt: skip
_GEMMA: dict[str, Any] = COMMON | {
    "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True,
    "attention_bias": False, "query_pre_attn_scalar": 256, "sliding_window": 4096, "layer_types": None,
    "final_logit_softcapping": None, "attn_logit_softcapping": None,
}  # fmt: skip
_GEMMA.pop("hidden_act")
LLAMA = COMMON | {"attention_bias": False, "mlp_bias": False}
MISTRAL = COMMON | {
    "intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096,
}  # fmt: skip
MINISTRAL = MISTRAL | {"layer_types": None}
QWEN2 = COMMON | {
    "vocab_size": 151936, "intermediate_size": 22016, "num_key_value_heads": 32, "max_position_embeddings": 32768,
    "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28, "layer_types": None,
}  # fmt: skip
QWEN3 = QWEN2 | {"head_dim": 128, "attention_bias": False}
PHI3 = COMMON | {
    "vocab_size": 32064, "hidden_size": 3072, "intermediate_size": 8192, "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "sliding_window": None,
    "partial_rotary_factor": 1.0,
}  # fmt: skip
GEMMA2 = _GEMMA | {
    "vocab_size": 256000, "max_position_embeddings": 8192, "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
}  # fmt: skip
GEMMA3 = _GEMMA | {
    "vocab_size": 262208, "max_position_embeddings": 131072, "rope_theta": 1000000.0, "rope_local_base_freq": 10000.0,
    "sliding_window_pattern": 6,
}  # fmt: skip
SMOLLM3 = COMMON | {
    "vocab_size": 128256, "hidden_size": 2048, "num_hidden_layers": 36, "num_attention_heads": 16,
    "num_key_value_heads": 4, "max_position_embeddings": 32768, "rope_theta": 2000000.0, "use_sliding_window": False,
    "sliding_window": None, "no_rope_layers": None, "no_rope_layer_interval": 4, "layer_types": None,
    "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": True,
}  # fmt: skip
GRANITE = LLAMA | {
    "embedding_multiplier": 1.0, "logits_scaling": 1.0, "residual_multiplier": 1.0, "attention_multiplier": 1.0,
}  # fmt: skip
OPT = _SIZES | {
    "vocab_size": 50272, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "ffn_dim": 3072,
    "activation_function": "relu", "do_layer_norm_before": True, "_remove_final_layer_norm": False,
    "word_embed_proj_dim": None, "enable_bias": True, "layer_norm_elementwise_affine": True,
    "tie_word_embeddings": True,
}  # fmt: skip
del OPT["intermediate_size"]

# Fields without effect: names, bookkeeping, token ids, settings of training, and defaults of sampling.
HARMLESS = frozenset({
    "architectures", "model_type", "transformers_version", "torch_dtype", "dtype", "_name_or_path", "name_or_path",
    "_commit_hash", "auto_map", "task_specific_params", "tokenizer_class", "prefix", "finetuning_task", "id2label",
    "label2id", "num_labels", "problem_type", "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id",
    "eod_token_id", "unk_token_id", "initializer_range", "init_std", "attention_dropout", "dropout", "hidden_dropout",
    "residual_dropout", "layerdrop", "embd_pdrop", "resid_pdrop", "gradient_checkpointing",
    "pretraining_tp", "use_cache", "cache_implementation", "output_attentions", "output_hidden_states", "return_dict",
    "chunk_size_feed_forward", "torchscript",
    "use_bfloat16", "attn_implementation", "_attn_implementation", "_attn_implementation_autoset",
    "output_router_logits", "router_aux_loss_coef", "router_jitter_noise", "experts_implementation", "aux_loss_alpha",
    "seq_aux", "ep_size", "qk_head_dim",
    "mtp_layer_types", "max_length", "min_length", "do_sample", "early_stopping",
    "num_beams", "temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty",
    "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences",
    "output_scores", "return_dict_in_generate", "forced_bos_token_id", "forced_eos_token_id",
    "remove_invalid_values", "suppress_tokens", "exponential_decay_length_penalty", "begin_suppress_tokens",
    "num_beam_groups", "diversity_penalty", "decoder_start_token_id",
})  # fmt: skip
# Fields that would change the computation, and the values with which they do not.
REFUSED: Mapping[str, tuple[Any, ...]] = {
    "is_encoder_decoder": (False, None),
    "is_causal": (True, None),
    "use_bidirectional_attention": (False, None),
    "per_layer_config": (None,),
    "pruned_heads": (None, {}),
    "quantization_config": (None, {}),
    "layer_norm_elementwise_affine": (True,),
}
_NULLABLE = frozenset(
    {
        "num_key_value_heads",
        "sliding_window",
        "sliding_window_pattern",
        "attn_logit_softcapping",
        "final_logit_softcapping",
        "moe_normalize_expert_weights",
        "q_lora_rank",
    }
)


def with_defaults(fields: Fields, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that `defaults` names; a field that is missing gets its value in `defaults`.

    A null value is kept if null is a valid value of the field.

    Raises:
        ModelError: if a field that must have a value is null, or a field of `REFUSED` would change the answers.
    """
    for name, plain in REFUSED.items():
        if name in fields and not any(fields[name] == value for value in plain):
            raise ModelError(f"{name} is {str(fields[name])[:80]} in the model's configuration, which is not supported")
    found = {name: fields.get(name, default) for name, default in defaults.items()}
    for name, default in defaults.items():
        if found[name] is None and default is not None and name not in _NULLABLE:
            raise ModelError(f"{name} is null in the model's configuration; a value is expected")
    return found


def unread(fields: Fields, defaults: Mapping[str, Any]) -> list[str]:
    """Return the sorted names of the fields that are neither read (`defaults`) nor known to have no effect."""
    return sorted(set(fields) - set(defaults) - HARMLESS - set(REFUSED))
