"""PIPO's tables and figures: predictions of the cost model for the paper's models and machines."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.result import Result, Row, Table
from master.planning.problem import planning_problem
from master.planning.shapes import model_shape
from scheduler.model.machine import NodeMachine, emulated_node
from scheduler.model.offload.choice import choose
from scheduler.model.offload.forecast import OffloadForecast, forecast
from scheduler.model.offload.work import Workload
from tpi.config import default_cache
from tpi.devices.emulated.machine import parse_emulated
from tpi.devices.options import OffloadOptions

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "vocab_size": 128256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "head_dim": 128,
}
MODELS: dict[str, dict[str, Any]] = {
    "Llama-3.1-8B": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8,
    },
    "Llama-3.1-70B": {
        "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
        "num_attention_heads": 64, "num_key_value_heads": 8,
    },
}  # fmt: skip
LAPTOP, DESKTOP = "rtx3060-laptop", "rtx4090-desktop"
PAPER_8B = {  # table 5: tokens/s of FlexGen and PIPO, by where weights and keys and values lie
    ("ram", "gpu"): (5.497, 6.058),
    ("ram", "ram"): (5.449, 6.009),
    ("disk", "gpu"): (1.926, 4.925),
    ("disk", "ram"): (1.765, 4.695),
}
PAPER_70B = {"ram": (1.113, 1.214), "disk": (0.497, 1.107)}  # table 1
CONTEXTS = (512, 1024, 1536, 2048, 3072)  # tokens: table 3 and figure 10
ANSWERS = (128, 256, 512, 1024)  # figure 11
NOTES = """
Nothing is run. The exact timeline of `tpi plan` predicts the paper's models in 4 bits on machines with the published
figures of its cards (docs/emulation.md), with batch 1 unless another is given. The paper's own figures are shown to
compare their *shape*, because its formats, kernels and drivers are different. Its figures for weights in RAM need a
link of about 24 GB/s, twice the speed that is assumed here for this laptop. Its figures for weights on disk need a disk
of 20 GB/s, so they must come from the page cache, which TPI bypasses. `memory over performance` is the share of the
speed that remains without preloading.
"""


def bench(quick: bool) -> Result:
    """Make the tables of predictions, as in the paper."""
    with TemporaryDirectory() as folder:
        tables = [
            Table("Llama-3.1-8B on an RTX 3060 laptop (table 5)", list(_places(folder))),
            Table("Llama-3.1-70B on an RTX 4090 desktop (table 1)", list(_seventy(folder))),
            Table("First token and decode by prompt, weights on disk (table 3, figure 10)", list(_contexts(folder))),
            Table("Throughput by answer, batch 4 (figure 11)", list(_answers(folder))),
        ]
    return Result("PIPO's tables, by plan", NOTES, tables, timed=False)


def _places(folder: str) -> Iterator[Row]:
    for (weights, kv), (flexgen, pipo) in PAPER_8B.items():
        options = OffloadOptions(weights, kv, "performance", 1)  # type: ignore[arg-type]
        found = _forecast(folder, "Llama-3.1-8B", LAPTOP, Workload(512, 32, 1, 1024), options)
        alone = _forecast(
            folder, "Llama-3.1-8B", LAPTOP, Workload(512, 32, 1, 1024), replace(options, pipeline="memory")
        )
        yield {
            "weights, KV": f"{weights}, {kv}",
            "planned": found.decode.rate,
            "memory over performance": alone.decode.rate / found.decode.rate,
            "accelerator busy": found.decode.use["accelerator"],
            "paper, PIPO": pipo,
            "paper, FlexGen": flexgen,
        }


def _seventy(folder: str) -> Iterator[Row]:
    for weights, (flexgen, pipo) in PAPER_70B.items():
        options = OffloadOptions(weights, "ram", "performance", 1)  # type: ignore[arg-type]
        found = _forecast(folder, "Llama-3.1-70B", DESKTOP, Workload(512, 32, 1, 1024), options)
        yield {"weights": weights, "planned": found.decode.rate, "paper, PIPO": pipo, "paper, FlexGen": flexgen}
    best = _forecast(folder, "Llama-3.1-70B", DESKTOP, Workload(512, 32, 1, 1024), OffloadOptions())
    yield {"weights": "as it chooses", "planned": best.decode.rate, "paper, PIPO": 7.718, "paper, FlexGen": 5.454}


def _contexts(folder: str) -> Iterator[Row]:
    for prompt in CONTEXTS:
        options = OffloadOptions("disk", "ram", "performance", 1)
        found = _forecast(folder, "Llama-3.1-8B", LAPTOP, Workload(prompt, 32, 1, prompt + 32), options)
        yield {"prompt": prompt, "first token s": found.ttft, "decode s": found.decode.seconds}


def _answers(folder: str) -> Iterator[Row]:
    for answer in ANSWERS:
        options = OffloadOptions("disk", "ram", "auto", 1)
        found = _forecast(folder, "Llama-3.1-8B", LAPTOP, Workload(512, answer, 4, 512 + answer), options)
        yield {"answer": answer, "tokens/s": found.decode.rate}


def _forecast(folder: str, model: str, machine: str, request: Workload, options: OffloadOptions) -> OffloadForecast:
    shape = model_shape(str(_config(folder, model)), "q4", default_cache(), 0)
    problem = planning_problem(shape, _machine(machine), request, options, None)
    return forecast(problem, choose(problem).offload)


def _machine(name: str) -> NodeMachine:
    return emulated_node(parse_emulated(name))


def _config(folder: str, model: str) -> Path:
    path = Path(folder) / model / "config.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(LLAMA | MODELS[model]))
    return path
