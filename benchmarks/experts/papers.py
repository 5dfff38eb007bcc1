"""MoE-Lightning's tables and figures: predictions of the roofline model for the paper's models and machines."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.experts.flexgen import flexgen_policy
from benchmarks.result import Check, Result, Row, Table
from master.planning.batch import batch_problem
from master.planning.problem import planning_case
from master.planning.shapes import ModelShape, model_shape
from scheduler.model.machine import NodeMachine, emulated_node
from scheduler.model.offload.work import Workload
from scheduler.model.roofline.forecast import forecast_batch
from scheduler.model.roofline.latency import throughput
from scheduler.model.roofline.policy import BatchPolicy, BatchProblem
from scheduler.model.roofline.search import best_policy
from tpi.config import default_cache
from tpi.devices.emulated.machine import parse_emulated

GIB = 1 << 30
MIXTRAL: dict[str, Any] = {
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "hidden_act": "silu", "vocab_size": 32000,
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2, "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5, "rope_theta": 1e6, "tie_word_embeddings": False,
}  # fmt: skip
LARGE = {"hidden_size": 6144, "intermediate_size": 16384, "num_hidden_layers": 56, "num_attention_heads": 48}
DBRX: dict[str, Any] = {
    "architectures": ["DbrxForCausalLM"], "model_type": "dbrx", "d_model": 6144, "n_heads": 48, "n_layers": 40,
    "max_seq_len": 32768, "vocab_size": 100352, "tie_word_embeddings": False,
    "attn_config": {"kv_n_heads": 8, "clip_qkv": 8, "rope_theta": 500000},
    "ffn_config": {"ffn_hidden_size": 10752, "moe_num_experts": 16, "moe_top_k": 4},
}  # fmt: skip
MODELS = {"Mixtral 8x7B": MIXTRAL, "Mixtral 8x22B": MIXTRAL | LARGE, "DBRX": DBRX}
REQUESTS = 4096  # that wait
ANSWERS = (32, 64, 128, 256)  # tokens, of MTBench
MTBENCH, LONGEST = 77, 418  # tokens of a prompt: the mean, and what FlexGen pads to
# table 4: prompt, answer, tokens/s of MoE-Lightning(p) and FlexGen
HELM = {
    ("Synthetic Reasoning", "S1"): (256, 50, 26.349, 22.691),
    ("Synthetic Reasoning", "S2"): (256, 50, 105.29, 50.138),
    ("Summarization", "S1"): (1984, 64, 4.52, 3.868),
    ("Summarization", "S2"): (1984, 64, 12.393, 7.14),
}
NOTES = """
Nothing is run. The roofline model predicts the paper's models in 16 bits on machines with the published figures of its
cards (docs/emulation.md), with 4096 waiting requests. FlexGen's policy comes from FlexGen's linear program and is timed
by the same model, with attention on the accelerator. Several cards multiply the memory, the speed and the links of one
(section 4.3). The paper's figures are shown to compare their *shape*: its kernels and PCIe are slower than data sheets
say. No parameter is fitted to them.
"""


@dataclass(frozen=True)
class PaperSetting:
    """A line of table 2: a preset of a card, the number of cards, and GB of RAM."""

    preset: str
    cards: int
    memory: int

    @property
    def machine(self) -> NodeMachine:
        """Machine with `cards` times a card's memory, speed and link."""
        node = emulated_node(parse_emulated(self.preset))
        device, times = node.accelerator, self.cards
        assert device is not None
        link = replace(device.link, up=times * device.link.up, down=times * device.link.down)
        rates = replace(device.rates, read=times * device.rates.read, operations=times * device.rates.operations)
        cards = replace(device, memory=times * device.memory, rates=rates, link=link)
        return replace(node, memory=self.memory * GIB, accelerator=cards)


SETTINGS = {
    "S1": ("Mixtral 8x7B", PaperSetting("t4", 1, 192)),
    "S2": ("Mixtral 8x7B", PaperSetting("l4", 1, 192)),
    "S6": ("Mixtral 8x22B", PaperSetting("t4", 2, 416)),
    "S7": ("Mixtral 8x22B", PaperSetting("t4", 4, 416)),
    "S8": ("DBRX", PaperSetting("t4", 2, 416)),
    "S9": ("DBRX", PaperSetting("t4", 4, 416)),
}


def bench(quick: bool) -> Result:
    """Make the tables of predictions, as in the paper."""
    with TemporaryDirectory() as folder:
        shapes = {name: _shape(Path(folder), name) for name in MODELS}
        lengths = list(_lengths(shapes))
        tables = [
            Table("MTBench, by answer (figures 7 and 8): tokens per second", lengths),
            Table("HELM (table 4)", list(_helm(shapes))),
            Table("Policies and their speed (table 5: S1, answers of 128)", list(_policies(shapes))),
            Table("By CPU memory (figure 1: S1, answers of 128)", list(_memories(shapes))),
            Table("Policy by link and CPU, two A100 (figure 10)", list(_machines(shapes))),
        ]
    scaled = [row for row in lengths if row["setting"] in ("S7", "S9")]
    scaling = min(float(row["over its first setting"]) for row in scaled)
    checks = [Check("four cards over two, the least (the paper: 2.1 to 3.4)", scaling, 2.0)]
    return Result("MoE-Lightning's tables, by plan", NOTES, tables, checks, timed=False)


def _lengths(shapes: dict[str, ModelShape]) -> Iterator[Row]:
    before: dict[tuple[str, int], float] = {}
    for setting in SETTINGS:
        model, machine = SETTINGS[setting]
        for answer in ANSWERS:
            ours, theirs = _both(_problem(shapes, setting, LONGEST, answer))
            tight = _problem(shapes, setting, MTBENCH, answer)
            unpadded = throughput(tight, best_policy(tight).policy)
            single = before.setdefault((model, answer), unpadded)
            yield {
                "setting": setting,
                "cards": machine.cards,
                "answer": answer,
                "ours, padded": ours,
                "ours": unpadded,
                "FlexGen's, padded": theirs,
                "padded over FlexGen": ours / theirs if theirs else 0.0,
                "over its first setting": unpadded / single,
            }


def _helm(shapes: dict[str, ModelShape]) -> Iterator[Row]:
    for (task, setting), (prompt, answer, paper, flexgen) in HELM.items():
        problem = _problem(shapes, setting, prompt, answer)
        policy, (ours, theirs) = best_policy(problem).policy, _both(problem)
        yield {
            "task": task,
            "setting": setting,
            "mu": policy.micro_batch,
            "N over mu": policy.micro_batches,
            "ours": ours,
            "FlexGen's": theirs,
            "gain": ours / theirs if theirs else 0.0,
            "paper, ours": paper,
            "paper, gain": paper / flexgen,
        }


def _policies(shapes: dict[str, ModelShape]) -> Iterator[Row]:
    problem = _problem(shapes, "S1", LONGEST, 128)
    ours, theirs = best_policy(problem).policy, flexgen_policy(problem)
    swapped = replace(ours, attention_there=True)
    told = (("FlexGen, its policy", theirs, 9.5), ("FlexGen, ours", swapped, 16.816), ("ours", ours, 30.12))
    slowest = throughput(problem, theirs)
    for name, policy, paper in told:
        rate = throughput(problem, policy)
        yield {
            "policy": name,
            "mu": policy.micro_batch,
            "N": policy.batch,
            "tok/s": rate,
            "gain": rate / slowest,
            "paper": paper,
            "paper, gain": paper / told[0][2],
        }


def _memories(shapes: dict[str, ModelShape]) -> Iterator[Row]:
    for size in (112, 128, 144, 160, 176, 192, 256, 320):
        problem = _problem(shapes, "S1", LONGEST, 128)
        ours, theirs = _both(replace(problem, machine=replace(problem.machine, memory=size * GIB)))
        yield {"GiB of RAM": size, "ours": ours, "FlexGen's": theirs}


def _machines(shapes: dict[str, ModelShape]) -> Iterator[Row]:
    """Predict section 6.3: two A100 with 80 GB, a host of 200 GB, 100 GB/s and 1.6 TFLOP/s times a ratio."""
    for link in (100, 300, 500):
        for ratio in (1, 4, 10):
            words = f"160GiB,link={link}GB/s,memory=4TB/s,flops=624TFLOPS,host_memory={100 * ratio}GB/s"
            device = f"{words},host_flops={1.6 * ratio}TFLOPS,ram={200 * ratio}GiB,disk=3GB/s"
            machine = emulated_node(parse_emulated(device))
            problem = _batch(shapes["Mixtral 8x7B"], machine, 512, 32)
            ahead = forecast_batch(problem, best_policy(problem).policy)
            policy = ahead.policy
            yield {
                "link GB/s": link,
                "CPU ratio": ratio,
                "attention on": "GPU" if policy.attention_there else "CPU",
                "weights on the GPU": policy.weights_kept,
                "N": policy.batch,
                "tok/s": ahead.rate,
            }


def _both(problem: BatchProblem) -> tuple[float, float]:
    """Return the tokens per second of TPI's policy and of FlexGen's.

    The second is 0 if FlexGen's program finds no policy that fits.
    """
    return throughput(problem, best_policy(problem).policy), _theirs(problem)


def _theirs(problem: BatchProblem) -> float:
    try:
        policy: BatchPolicy = flexgen_policy(problem)
    except ValueError:
        return 0.0
    return throughput(problem, policy)


def _problem(shapes: dict[str, ModelShape], setting: str, prompt: int, answer: int) -> BatchProblem:
    model, machine = SETTINGS[setting]
    return _batch(shapes[model], machine.machine, prompt, answer)


def _batch(shape: ModelShape, machine: NodeMachine, prompt: int, answer: int) -> BatchProblem:
    request = Workload(prompt, answer, REQUESTS, prompt + answer)
    return batch_problem(planning_case(shape, machine, request, kv_dtype="f16"), REQUESTS)


def _shape(folder: Path, name: str) -> ModelShape:
    path = folder / name / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps(MODELS[name]))
    return model_shape(str(path), "bf16", default_cache(), 0)
