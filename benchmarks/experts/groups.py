"""CGOPipe on one emulated node and on a group of two; prompts in steps of 512 tokens and in one. Tables of `cgopipe`.

A miniature keeps the paper's proportions. The sequences at once are an eighth of the hidden size, as 504 are of 4096,
and calls start as quickly as on real cards. Where the GPU computes, the starts of its calls and its transfers take
about 3% of its time, as with Mixtral 8x7B on a T4.
"""

from dataclasses import dataclass

from benchmarks.experts.batch_node import CONTEXT, batch_node
from benchmarks.result import Check, Row, Table
from scheduler.model.roofline.latency import PolicyPoint, roofs

DEVICE = (
    "{gpu}MiB,link={link}GB/s,memory=40GB/s,flops={flops}TFLOPS,host_memory={host}GB/s,host_flops=0.1TFLOPS,disk=0.6GB/s,"
    "latency=10us,launch=10us,stretch={stretch},ram=1GiB"
)
SEQUENCES, STEPS, STRETCH = 64, 2, 96
FILLED = CONTEXT * 3 // 4  # tokens of each sequence
PROMPTS, TOKENS, SHORT = 96, 64, 512  # prompts, tokens of each, and of a step
ALIKE, BOUND = 1.9, 2.0  # aims: two devices over one, and where memory bounds


@dataclass(frozen=True)
class GroupSetting:
    """One machine of a group of one or two: MiB, GB/s and TFLOPS. `aim` is the promised speed of two nodes over one."""

    name: str
    gpu: int
    link: float
    flops: float
    host: float
    aim: float

    @property
    def device(self) -> str:
        """Device in the syntax of `emu:`."""
        return DEVICE.format(gpu=self.gpu, link=self.link, flops=self.flops, host=self.host, stretch=STRETCH)


GROUPS = (
    GroupSetting("the GPU computes, all weights fit", 96, 1, 0.02, 6, ALIKE),
    GroupSetting("GPU memory bounds, the link decides", 20, 1, 0.4, 6, BOUND),
)


def groups(quick: bool) -> tuple[list[Table], list[Check]]:
    """Measure one node against two, and short prompt steps against long ones."""
    rows: list[Row] = []
    checks: list[Check] = []
    for setting in GROUPS[1:] if quick else GROUPS:
        found = [_decode(setting, nodes, 1 if quick else STEPS) for nodes in (1, 2)]
        gain = float(found[1]["tok/s"]) / float(found[0]["tok/s"])
        rows += [{**row, "over one": gain if at else 1.0} for at, row in enumerate(found)]
        checks.append(Check(f"two devices over one: {setting.name}", gain, setting.aim))
    prompts = [_prompts(longest) for longest in ((SHORT, PROMPTS * TOKENS) if not quick else (SHORT,))]
    tables = [
        Table("One device, and two in a group of nodes", rows),
        Table("Prompts in short steps and in long ones", prompts),
    ]
    return tables, checks


def _decode(setting: GroupSetting, nodes: int, steps: int) -> Row:
    with batch_node(setting.device, SEQUENCES, FILLED, nodes=nodes) as node:
        node.steps(1)
        seconds, use, overran = node.steps(steps)
        plan, policy = node.link.settings, node.link.settings.policy
        bound = plan.problem.layer.layers * max(
            map(float, roofs(plan.problem, PolicyPoint.of(policy), "decode").values())
        )
        busiest = max(use, key=lambda lane: use[lane])
        return {
            "machine": setting.name,
            "nodes": nodes,
            "N": policy.batch,
            "mu": policy.micro_batch,
            "r_w": round(policy.weights_kept, 2),
            "tok/s": policy.batch / seconds,
            "bound": policy.batch / bound,
            "busiest lane": f"{busiest} {use[busiest]:.2f}",
            "overran": overran,
        }


def _prompts(longest: int) -> Row:
    """Measure prompts with all weights in RAM, so that each step transfers them over the link."""
    device = DEVICE.format(gpu=256, link=1, flops=4, host=6, stretch=STRETCH)
    with batch_node(device, PROMPTS, 0, steps=PROMPTS * TOKENS, weights="ram") as node:
        node.steps(1)
        seconds, crossed = node.prompts(TOKENS, longest)
        return {
            "tokens of a step": longest,
            "tok/s": PROMPTS * TOKENS / seconds,
            "MB of weights crossed": crossed / 1e6,
        }
