"""Writer of tiny models as PowerInfer's converter does: GGUF, predictors, and a split file.

The layout is that of github.com/SJTU-IPADS/PowerInfer: convert.py (q and k of Llama interleaved, `ffn_down_t`, `fc1`,
`fc2`, the threshold), and powerinfer-py/export_split.py (`gpu_idx` and `gpu_bucket`, both I32 by the number 18).
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, GGUFWriter

from tests.support.models import TinyModel
from tests.support.weights.gguf_models import encoded, gguf_tensors

Array = npt.NDArray[Any]
F32 = npt.NDArray[np.float32]
_I32 = 18  # in the ggml that PowerInfer is made from


def predictor_of(neurons: int, hidden: int, rank: int, seed: int) -> tuple[F32, F32]:
    """Return random matrices `[rank, hidden]` and `[neurons, rank]` whose values float16 represents exactly."""
    random = np.random.default_rng(seed)
    made = (random.standard_normal(shape).astype(np.float16) for shape in ((rank, hidden), (neurons, rank)))
    first, second = (values.astype(np.float32) for values in made)
    return first, second


def powerinfer_tensors(model: TinyModel, predictors: Mapping[int, tuple[F32, F32]]) -> dict[str, Array]:
    """Return the tensors of a Llama-like model by PowerInfer's names, float32."""
    found = gguf_tensors(model, "llama")
    for name in [name for name in found if name.endswith("ffn_down.weight")]:
        found[name.replace("ffn_down", "ffn_down_t")] = np.ascontiguousarray(found.pop(name).T)
    for layer, (first, second) in predictors.items():
        found |= {f"blk.{layer}.fc1.weight": first, f"blk.{layer}.fc2.weight": second}
    return found


def write_powerinfer(
    path: Path,
    model: TinyModel,
    tensors: Mapping[str, Array],
    architecture: str = "llama",
    kind: Callable[[str], str] = lambda name: "F16" if ".fc" in name else "F32",
    threshold: float | None = 0.25,
) -> None:
    """Write `tensors`; `kind(name)` is the GGML type of each matrix, and int32 gets PowerInfer's number for I32."""
    config = model.reference.config
    writer = GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if threshold is not None:
        writer.add_float32("powerinfer.sparse_threshold", threshold)
    for name, values in tensors.items():
        if values.dtype == np.int32:
            writer.add_tensor(name, values, raw_dtype=GGMLQuantizationType.I32)
            continue
        raw = encoded(values, kind(name) if values.ndim > 1 else "F32")
        dtype = GGMLQuantizationType[kind(name)] if raw.dtype == np.uint8 else None
        writer.add_tensor(name, raw, raw_dtype=dtype)
    _finish(writer, path)
    if whole := sum(values.dtype == np.int32 for values in tensors.values()):
        _renumber(path, GGMLQuantizationType.I32, _I32, whole)


def falcon_tensors(reference: Any, predictors: Mapping[int, tuple[F32, F32]]) -> dict[str, Array]:
    """Return the tensors of a newer FalconForCausalLM: queries, keys and values in a row, down transposed."""
    config, found = reference.config, {}
    names = {
        "self_attention.query_key_value": "attn_qkv", "self_attention.dense": "attn_output",
        "mlp.dense_h_to_4h": "ffn_up", "mlp.dense_4h_to_h": "ffn_down_t", "ln_mlp": "attn_norm",
        "ln_attn": "attn_norm_2", "input_layernorm": "attn_norm",
    }  # fmt: skip
    ends = {"word_embeddings.weight": "token_embd.weight", "ln_f.weight": "output_norm.weight",
            "ln_f.bias": "output_norm.bias"}  # fmt: skip
    for name, tensor in reference.transformer.state_dict().items():
        layer, _, rest = name.removeprefix("h.").partition(".")
        if name in ends:
            found[ends[name]] = tensor.numpy()
            continue
        base, _, kind = rest.rpartition(".")
        values = tensor.numpy()
        if names[base] == "attn_qkv":
            group = config.num_attention_heads // config.num_kv_heads
            by_head = values.reshape(
                config.num_kv_heads, group + 2, config.hidden_size // config.num_attention_heads, -1
            )
            parts = (by_head[:, :-2], by_head[:, -2], by_head[:, -1])
            values = np.concatenate([part.reshape(-1, config.hidden_size) for part in parts])
        found[f"blk.{layer}.{names[base]}.{kind}"] = np.ascontiguousarray(
            values.T if names[base] == "ffn_down_t" else values
        )
    for layer, (first, second) in predictors.items():
        found |= {f"blk.{layer}.fc1.weight": first, f"blk.{layer}.fc2.weight": second}
    return found


def write_falcon(
    path: Path,
    reference: Any,
    predictors: Mapping[int, tuple[F32, F32]] | None,
    vocabulary: Callable[[GGUFWriter], None] = lambda writer: None,
) -> None:
    """Write a FalconForCausalLM of the newer kind in float32, its predictors in float16.

    Without predictors, write it as llama.cpp does.
    """
    config = reference.config
    writer = GGUFWriter(path, "falcon")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_tensor_data_layout("jploski")
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.ffn_hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_layer_norm_eps(config.layer_norm_epsilon)
    vocabulary(writer)
    if predictors is not None:
        writer.add_float32("powerinfer.sparse_threshold", 0.0)
    for name, values in falcon_tensors(reference, predictors or {}).items():
        plain = predictors is None and "ffn_down_t" in name
        rows = np.ascontiguousarray(values.T) if plain else values
        writer.add_tensor(
            name.replace("down_t", "down") if plain else name, encoded(rows, "F16" if ".fc" in name else "F32")
        )
    _finish(writer, path, powerinfer=predictors is not None)


def write_opt(
    path: Path,
    reference: Any,
    predictors: Mapping[int, tuple[F32, F32]],
    vocabulary: Callable[[GGUFWriter], None] = lambda writer: None,
    context: int = 2050,
) -> None:
    """Write an OPTForCausalLM in float32 as PowerInfer's converter does, its predictors in float16.

    The norms' epsilon is left out, and the context's length is that of the position table.
    """
    config = reference.config
    writer = GGUFWriter(path, "opt")
    writer.add_context_length(context)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.ffn_dim)
    writer.add_head_count(config.num_attention_heads)
    vocabulary(writer)
    writer.add_float32("powerinfer.sparse_threshold", 0.0)
    for name, values in opt_tensors(reference, predictors).items():
        writer.add_tensor(name, encoded(values, "F16" if ".weight" in name and ".fc" in name else "F32"))
    _finish(writer, path)


def opt_tensors(reference: Any, predictors: Mapping[int, tuple[F32, F32]]) -> dict[str, Array]:
    """Return the tensors of an OPTForCausalLM by PowerInfer's names, float32; down and its name are transposed."""
    names = {
        "self_attn_layer_norm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v", "self_attn.out_proj": "attn_output", "final_layer_norm": "ffn_norm",
        "fc1": "ffn_up", "fc2": "ffn_down_t",
    }  # fmt: skip
    whole = {"embed_tokens": "token_embd", "embed_positions": "position_embd", "final_layer_norm": "output_norm"}
    found: dict[str, Array] = {}
    for name, tensor in reference.model.decoder.state_dict().items():
        base, _, kind = name.rpartition(".")
        values = tensor.numpy()
        if base in whole:
            found[f"{whole[base]}.{kind}"] = values
            continue
        _, layer, part = base.split(".", 2)
        found[f"blk.{layer}.{names[part]}.{kind}"] = np.ascontiguousarray(values.T if part == "fc2" else values)
    for layer, (first, second) in predictors.items():
        found |= {f"blk.{layer}.fc1.weight": first, f"blk.{layer}.fc2.weight": second}
    return found


def write_split(path: Path, marks: Mapping[int, npt.NDArray[np.int32]], capacity: int = 1 << 30) -> None:
    """Write the neurons of each layer that PowerInfer's solver puts on the GPU: `marks` are 1 for these, else 0."""
    writer = GGUFWriter(path, "generic.gpu_index")
    writer.add_block_count(len(marks))
    writer.add_uint64("split.vram_capacity", capacity)
    for layer, values in marks.items():
        for name, array in (("gpu_idx", values), ("gpu_bucket", np.flatnonzero(values).astype(np.int32))):
            writer.add_tensor(f"blk.{layer}.{name}", array, raw_dtype=GGMLQuantizationType.I32)
    _finish(writer, path)
    _renumber(path, GGMLQuantizationType.I32, _I32, 2 * len(marks))


def _finish(writer: GGUFWriter, path: Path, powerinfer: bool = True) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if not powerinfer:
        return
    with path.open("r+b") as file:
        file.write(b"PWRI" + (3).to_bytes(4, "little"))


def _renumber(path: Path, before: int, after: int, tensors: int) -> None:
    """Change the type number of each of `tensors` (after its name and one length) to that of an older ggml."""
    content, changed = path.read_bytes(), 0
    for name in ("gpu_idx", "gpu_bucket"):
        at = content.find(name.encode())
        while at >= 0:
            place = at + len(name) + 4 + 8  # dimensions, one length
            assert content[place : place + 4] == int(before).to_bytes(4, "little")
            content = content[:place] + after.to_bytes(4, "little") + content[place + 4 :]
            changed, at = changed + 1, content.find(name.encode(), place)
    assert changed == tensors
    path.write_bytes(content)
