"""Collectives in the paper's home: SmolLM2 on eight devices, decode and prefill, as the links get slower or faster."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.network.awake import awake
from benchmarks.network.home import MEGABIT, MILLISECOND, Home, home, paper_homes
from benchmarks.result import Bars, Check, Result, Row, Table

MODEL = "smollm2-135m"
PROMPT = 128
FAST = ("star", "mesh", "two-shot", "auto")
SLOW = ("tree", "ring")  # these are so slow that they get one turn, with few tokens
NOTES = """
SmolLM2 (30 layers, 60 sums for each token, hidden size 576) on the paper's testbed: eight devices behind eight gateways
and a core router. All links of a path are alike. The wire is the default: bf16, and a star returns the sum in f32. All
eight devices compute on this machine's two cores. *Sync* is the time that the master spends in sums for each decoded
token: latency, transfer, and waiting for slower nodes. *Predicted* is the time that the automatic choice expects from
its measurements of the links, for the algorithm that it chose. The collectives take turns of 30 s, and the fastest of
five turns counts, because the load of other guests of the host can only add time. A turn is the median of three
answers to a prompt of 128 tokens. Tree and ring get one turn of one answer.

Proposition 1 (latency decides, not bandwidth) does not hold for large payloads. A prompt of 128 tokens is 147 kB for
each sum and node, and its time depends on the bandwidth for all algorithms but the two-shot. Processors are prevented
from sleeping (`benchmarks/network/awake.py`).
"""


@dataclass(frozen=True)
class Scene:
    """One network: its one-way latency from device to device in milliseconds, and its Mbit/s."""

    latency_ms: float
    bandwidth_mbit: float

    @property
    def name(self) -> str:
        """The scene's name in tables."""
        return f"{self.latency_ms:g} ms, {self.bandwidth_mbit:g} Mbit"


@dataclass(frozen=True)
class Measured:
    """One run of `tpi bench`. Milliseconds; decode and sync per token, prefill for the whole prompt."""

    decode: float
    sync: float
    prefill: float
    predicted: float | None
    chosen: tuple[str, str]  # for decode and prefill


Turns = dict[str, list[Measured]]  # by collective
SCENES = (Scene(4, 300), Scene(5, 300), Scene(10, 300))
FASTER = Scene(4, 1000)


@awake()
def bench(quick: bool) -> Result:
    """Measure all collectives at three latencies, and the fast ones at 1 Gbit as well."""
    turns = 1 if quick else 5
    slow = () if quick else SLOW
    measured = {scene: measure(scene, FAST, slow, turns) for scene in SCENES}
    measured[FASTER] = measure(FASTER, FAST, (), turns)
    checks = [check for scene in SCENES for check in _checks(scene, measured[scene])]
    checks += _auto_checks(FASTER, measured[FASTER])
    checks += _bandwidth_checks(measured[SCENES[0]], measured[FASTER])
    tables = [Table(f"{scene.name} ({_choice(runs)})", _rows(runs)) for scene, runs in measured.items()]
    return Result("Collectives in a home network", NOTES, tables, checks, _plots(measured))


def measure(scene: Scene, fast: Sequence[str], slow: Sequence[str], turns: int) -> Turns:
    """Measure the fast collectives in turn, `turns` times, then the slow ones once."""
    runs: Turns = {name: [] for name in (*fast, *slow)}
    topology = paper_homes(scene.latency_ms * MILLISECOND, scene.bandwidth_mbit * MEGABIT)
    with home(topology) as place:
        for _ in range(turns):
            for name in fast:
                runs[name].append(_run(place, name, tokens=4, answers=3))
        for name in slow:
            runs[name].append(_run(place, name, tokens=2, answers=1))
    return runs


def _run(place: Home, collective: str, tokens: int, answers: int) -> Measured:
    flags = [] if collective == "auto" else ["--collective", collective]
    work = ["--prompt-tokens", PROMPT, "--gen-tokens", tokens, "--repeat", answers]
    said = place.bench(MODEL, *work, *flags)
    return _measured(said)


def _measured(said: dict[str, Any]) -> Measured:
    return Measured(
        decode=1e3 / said["decode_tokens_per_s"],
        sync=said["nodes"][0]["sync_ms_per_token"],
        prefill=1e3 * said["ttft_s"],
        predicted=said["predicted_sync_ms"],
        chosen=(said["collective"], said["prefill_collective"]),
    )


def _least(runs: Turns, name: str, figure: str) -> float:
    return min(float(getattr(run, figure)) for run in runs[name])


def ratio(runs: Turns, name: str, others: Sequence[str], figure: str) -> float:
    """Return the least `figure` of the collective `name` over the least `figure` of `others`."""
    return _least(runs, name, figure) / min(_least(runs, other, figure) for other in others)


def _rows(runs: Turns) -> list[Row]:
    rows: list[Row] = []
    for name in runs:
        predicted = runs[name][0].predicted
        rows.append(
            {
                "collective": name,
                "sync ms/token": _least(runs, name, "sync"),
                "predicted": "" if predicted is None else _least(runs, name, "predicted"),
                "decode ms/token": _least(runs, name, "decode"),
                f"prefill of {PROMPT}, ms": _least(runs, name, "prefill"),
            }
        )
    return rows


def _choice(runs: Turns) -> str:
    """Name the collective that auto chose, or all that it chose if the choice changed between turns."""
    chosen = list(dict.fromkeys(run.chosen for run in runs["auto"]))
    return "auto: " + ", then ".join(f"{decode} and {prefill}" for decode, prefill in chosen)


def _checks(scene: Scene, runs: Turns) -> list[Check]:
    checks = [
        Check(f"{scene.name}: sync of {slow} over star's", ratio(runs, slow, ["star"], "sync"), 1.0)
        for slow in SLOW
        if slow in runs
    ]
    checks.append(Check(f"{scene.name}: sync of mesh over star's", ratio(runs, "mesh", ["star"], "sync"), 0.65, True))
    return checks + _auto_checks(scene, runs)


def _auto_checks(scene: Scene, runs: Turns) -> list[Check]:
    alone = [name for name in runs if name != "auto"]
    return [
        Check(f"{scene.name}: {figure} of auto over the best", ratio(runs, "auto", alone, figure), 1.05, True)
        for figure in ("decode", "prefill")
    ]


def _bandwidth_checks(normal: Turns, faster: Turns) -> list[Check]:
    """Check proposition 1: latency decides, so decoding takes as long at 1 Gbit as at 300 Mbit."""
    return [
        Check(
            f"{SCENES[0].name} to 1 Gbit: decode time of {name}, times before",
            _least(faster, name, "decode") / _least(normal, name, "decode"),
            1.0,
            within=0.10,
        )
        for name in FAST
    ]


def _plots(measured: dict[Scene, Turns]) -> list[Bars]:
    names = [scene.name for scene in SCENES]
    collectives = list(measured[SCENES[0]])
    titles = {"sync": "Sync per token, SmolLM2 on eight devices", "prefill": f"Prefill of {PROMPT} tokens"}
    return [
        Bars(title, "ms", names, {c: [_least(measured[scene], c, figure) for scene in SCENES] for c in collectives})
        for figure, title in titles.items()
    ]
