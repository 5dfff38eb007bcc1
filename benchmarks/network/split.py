"""Unequal machines: the planned split against equal parts, and against its prediction."""

from statistics import median

from benchmarks.network.awake import awake
from benchmarks.network.home import MEGABIT, MILLISECOND, home
from benchmarks.result import Check, Result, Row, Table
from benchmarks.support.models import llama_1b
from tpi.topology.topology import Host, HostLink, Router, Topology

CORES = (0.4, 0.2, 0.1, 0.1)
FASTER, WITHIN = 1.5, 0.15
REQUEST = ("-c", "256", "--prompt-tokens", "16", "--gen-tokens")
TOKENS, FEW = 16, 2  # tokens of an answer; fewer for equal parts, which wait 100 ms at each of 44 sums a token
NOTES = """
The 1.1B shape in Q4_0 on machines of 0.4, 0.2, 0.1 and 0.1 core, with 0.2 ms and 1 Gbit from end to end. A second case
has three machines of 0.2 core, of which the last is 100 ms away. It gets one turn, and the equal split generates only
two tokens, ten seconds each. The two splits take turns on the same workers. Tokens/s are medians of the turns, and
ratios are medians of the ratios of the turns. *Predicted* is the output of `tpi plan --workers` on the first machine
before any run: workers measure themselves when they start, and links are measured by echoes. This plan chooses the
devices that are left out.
"""


def uneven(cores: tuple[float, ...], far: float) -> Topology:
    """Return devices around one router; the last one is `far` seconds from it."""
    near = 0.1 * MILLISECOND
    devices = tuple(Host(f"device{number}", cpu=each) for number, each in enumerate(cores, 1))
    delays = [near] * (len(cores) - 1) + [far]
    links = tuple(
        HostLink((one.name, "router"), 1000 * MEGABIT, delay) for one, delay in zip(devices, delays, strict=True)
    )
    return Topology("uneven", devices, links, (Router("router"),))


@awake()
def bench(quick: bool) -> Result:
    """Measure the planned and the equal split in two homes."""
    rows, checks = [], []
    for about, topology, turns, equal in (
        ("0.4, 0.2, 0.1, 0.1 core", uneven(CORES, 0.1 * MILLISECOND), 1 if quick else 5, TOKENS),
        ("3 x 0.2 core, one 100 ms away", uneven((0.2, 0.2, 0.2), 100 * MILLISECOND), 1, FEW),
    ):
        row = _compare(about, topology, turns, {"equal": equal, "auto": TOKENS})
        rows.append(row)
        ratio = float(row["times equal parts"])
        off = abs(float(row["predicted tok/s"]) / float(row["planned tok/s"]) - 1)
        checks.append(Check(f"{about}: planned over equal parts", ratio, FASTER))
        checks.append(Check(f"{about}: predicted off by", off, WITHIN, at_most=True))
    return Result("A split over machines that differ", NOTES, [Table("", rows)], checks)


def _compare(about: str, topology: Topology, turns: int, tokens: dict[str, int]) -> Row:
    """Measure the splits in turn, `turns` times, with answers of `tokens[split]` tokens. Return a row of the table."""
    model = str(llama_1b().path)
    with home(topology) as place:
        plan = place.plan(model, *REQUEST, TOKENS)
        speeds: dict[str, list[float]] = {split: [] for split in tokens}
        for turn in range(turns):
            for split in sorted(speeds, reverse=turn % 2 > 0):
                said = place.bench(model, *REQUEST, tokens[split], "--repeat", "1", "--split", split)
                speeds[split].append(said["decode_tokens_per_s"])
    ratios = [mine / equal for mine, equal in zip(speeds["auto"], speeds["equal"], strict=True)]
    best = plan["layouts"]["best"][0]
    parts = [f"{stage['layers'][0]}-{stage['layers'][1] - 1}: {'+'.join(stage['nodes'])}" for stage in best["stages"]]
    used = {node for stage in best["stages"] for node in stage["nodes"]}
    out = [name for name in ("master", *(each.name for each in topology.devices[1:])) if name not in used]
    return {
        "machines": about,
        "layers": ", ".join(parts),
        "left out": ", ".join(out) or "-",
        "predicted tok/s": 1 / best["seconds"],
        "planned tok/s": median(speeds["auto"]),
        "equal tok/s": median(speeds["equal"]),
        "times equal parts": median(ratios),
    }
