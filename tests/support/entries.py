"""Tiny configurations of families that differ from others in few settings, as small as the other tiny models."""

from collections.abc import Callable, Mapping
from typing import Any

DENSE = ("gemma", "arcee", "seedoss", "ernie45", "ministral3")
HUNYUAN = ("hunyuan", "hunyuanmoe")  # which norm their heads after RoPE
AFTERNORM = ("olmo2", "olmo3", "exaone4")
MUSE = ("museglimmer",)
EXAONE = ("exaonemoe",)
ROUTED = ("glm4moe", "minimaxm2", "ernie45moe", "granitemoeshared", "granitehybrid")
ENTRIES = (*DENSE, *ROUTED, *AFTERNORM, *HUNYUAN, *MUSE, *EXAONE)
ORDERS = (*AFTERNORM, *HUNYUAN, *MUSE, *EXAONE)  # whose norms are elsewhere than Llama's
MUSE_VISION: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 4,
    "pos_emb_height": 4, "pos_emb_width": 4, "max_position_embeddings": 16,
}  # fmt: skip
GRANITE = {"embedding_multiplier": 12.0, "logits_scaling": 4.0, "residual_multiplier": 0.22,
            "attention_multiplier": 0.1}  # fmt: skip


def configs(sizes: Mapping[str, Any]) -> dict[str, Callable[[], Any]]:
    """Return the configurations, by the names in `ENTRIES`."""
    import transformers

    odd = {**sizes, "intermediate_size": 100}
    half = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}}
    return {
        "gemma": lambda: transformers.GemmaConfig(**sizes, head_dim=32),
        "arcee": lambda: transformers.ArceeConfig(**odd, mlp_bias=True),
        "seedoss": lambda: transformers.SeedOssConfig(**sizes, head_dim=32, attention_out_bias=True, mlp_bias=True),
        "ernie45": lambda: transformers.Ernie4_5Config(**sizes, head_dim=32, use_bias=True, tie_word_embeddings=False),
        "ministral3": lambda: transformers.Ministral3Config(
            **sizes, head_dim=32, rope_parameters={
                "rope_type": "yarn", "rope_theta": 10000.0, "factor": 16.0, "original_max_position_embeddings": 16,
                "llama_4_scaling_beta": 0.3, "mscale": 1.0, "mscale_all_dim": 1.0,
            },
        ),
        "olmo2": lambda: transformers.Olmo2Config(**odd, attention_bias=True),
        "olmo3": lambda: transformers.Olmo3Config(
            **sizes, sliding_window=12, layer_types=["sliding_attention", "full_attention"], rope_parameters={
                "full_attention": {
                    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 16,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        ),
        "exaone4": lambda: transformers.Exaone4Config(
            **odd, sliding_window=12, layer_types=["sliding_attention", "full_attention"],
        ),
        "hunyuan": lambda: transformers.HunYuanDenseV1Config(
            **odd, head_dim=32, attention_bias=True, rope_parameters={
                "rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 50.0, "factor": 1.0,
            },
        ),
        "hunyuanmoe": lambda: transformers.HunYuanMoEV1Config(
            **odd, head_dim=32, num_experts=5, moe_topk=2, rope_parameters={
                "rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 50.0, "factor": 1.0,
            },
        ),
        "museglimmer": lambda: transformers.MuseGlimmerConfig(
            text_config=odd | {
                "head_dim": 32, "sliding_window": 12, "attention_bias": True, "post_norm_eps": 1e-2,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            vision_config=MUSE_VISION, out_hidden_size=64, projector_hidden_size=16,
        ),
        "exaonemoe": lambda: transformers.ExaoneMoeConfig(
            **odd, sliding_window=12, layer_types=["full_attention", "sliding_attention"], num_experts=6,
            num_experts_per_tok=2, moe_intermediate_size=68, num_shared_experts=2, n_group=2,
        ),
        "glm4moe": lambda: transformers.Glm4MoeConfig(
            **sizes, **half, n_routed_experts=8, num_experts_per_tok=3, moe_intermediate_size=100, n_shared_experts=2,
            routed_scaling_factor=1.5, use_qk_norm=True, attention_bias=True, n_group=2,
        ),
        "minimaxm2": lambda: transformers.MiniMaxM2Config(
            **odd, **half, head_dim=32, num_local_experts=6, num_experts_per_tok=3,
        ),
        "ernie45moe": lambda: transformers.Ernie4_5_MoeConfig(
            **sizes, moe_num_experts=5, moe_k=2, moe_intermediate_size=100, moe_num_shared_experts=2,
        ),
        "granitemoeshared": lambda: transformers.GraniteMoeSharedConfig(
            **odd, **GRANITE, num_local_experts=5, shared_intermediate_size=172,
        ),
        "granitehybrid": lambda: transformers.GraniteMoeHybridConfig(
            **odd, **GRANITE, num_local_experts=0, shared_intermediate_size=172, position_embedding_type="rope",
            layer_types=["full_attention"] * 2, mamba_n_heads=6,
        ),
    }  # fmt: skip
