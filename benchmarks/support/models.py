"""The models that benchmarks run, made or fetched once into the cache."""

from dataclasses import dataclass
from pathlib import Path

from tpi.config import default_cache
from tpi.pack.library.pull import pull


@dataclass(frozen=True)
class Model:
    """A GGUF file or a Hugging Face directory, and its name in tables."""

    name: str
    path: Path


def smollm2() -> Model:
    """Return SmolLM2-135M-Instruct in Q4_1 with its embedding in Q8_0; download it unless it is in the cache."""
    return Model("SmolLM2-135M Q4_1", pull("smollm2-135m", default_cache()))


def llama_1b() -> Model:
    """Return random weights in the 1.1B Llama shape, in Q4_0; write them unless they exist."""
    from benchmarks.support.gguf_shape import write_gguf
    from tests.support.weights.shapes import LLAMA_1B

    return Model("1.1B Q4_0", write_gguf(default_cache() / "benchmarks" / "llama-1.1b.Q4_0.gguf", dict(LLAMA_1B)))


def olmoe_layers(layers: int = 4) -> Model:
    """Return `layers` random layers of OLMoE-1B-7B's shape in Q4_0, with a small vocabulary; write them once."""
    from benchmarks.support.gguf_shape import write_gguf

    shape: dict[str, object] = {
        "hidden_size": 2048, "intermediate_size": 1024, "num_hidden_layers": layers, "num_attention_heads": 16,
        "num_key_value_heads": 16, "head_dim": 128, "vocab_size": 12_000, "max_position_embeddings": 4096,
        "num_experts": 64, "num_experts_per_tok": 8, "rms_norm_eps": 1e-5, "rope_theta": 10_000.0,
    }  # fmt: skip
    path = default_cache() / "benchmarks" / f"olmoe-{layers}.Q4_0.gguf"
    return Model(f"{layers} layers of OLMoE-1B-7B Q4_0", write_gguf(path, shape))


def llama_1b_f32() -> Model:
    """Return random weights in the 1.1B Llama shape in f32 (4.4 GB); write them unless they exist."""
    from tests.support.weights.shapes import LLAMA_1B, write_huggingface

    return Model("1.1B f32", write_huggingface(default_cache() / "benchmarks" / "llama-1.1b-f32", dict(LLAMA_1B)))


def reglu_1b(active: float = 0.1) -> Model:
    """Write a q4 pack of the 1.1B shape with ReLU and its predictors; the share `active` of its neurons is active."""
    from tests.support.weights.regular import NeuronUse, write_regular
    from tests.support.weights.shapes import LLAMA_1B

    target = default_cache() / "benchmarks" / f"reglu-1.1b-{active:g}.pack"
    return Model(f"1.1B ReGLU q4, {active:.0%} active", write_regular(target, LLAMA_1B, NeuronUse(active)).path)


def profiled_reglu_1b() -> tuple[Path, Path]:
    """Return the pack of `reglu_1b` and its copy with neurons renumbered by a profile; make both unless they exist.

    The model counts upwards, so a prompt is consecutive numbers. The profile's prompts start at numbers that the
    benchmarks do not use.
    """
    import numpy as np

    from master.profiling.measure import profile_model
    from master.profiling.numbering import Numbering
    from tpi.kernels import open_kernels
    from tpi.pack.reader import Pack
    from tpi.progress import phase

    pack = Pack.open(reglu_1b().path)
    starts = np.linspace(1000, pack.config.vocab - 100, 32).astype(np.int32)
    tokens = (starts[:, None] + np.arange(64)).astype(np.int32)
    with phase("profiling the 1.1B ReGLU") as progress:
        use = profile_model(pack, tokens, open_kernels(), progress)
        numbering = Numbering.of(pack, use, [1])
        numbering.keep(default_cache(), progress)
    return pack.path, numbering.path


def reglu_layers(layers: int = 8) -> Model:
    """Write some layers of the ReGLU shape with a small vocabulary, small enough to run on stretched time."""
    from tests.support.weights.regular import NeuronUse, write_regular
    from tests.support.weights.shapes import LLAMA_1B

    shape = LLAMA_1B | {"num_hidden_layers": layers, "vocab_size": 2048}
    target = default_cache() / "benchmarks" / f"reglu-{layers}x2048.pack"
    return Model(f"{layers} layers of the 1.1B ReGLU", write_regular(target, shape, NeuronUse()).path)
