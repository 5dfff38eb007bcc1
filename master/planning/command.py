"""The command `tpi plan`: flags in, a table or one JSON object out. It reads no weights."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TextIO

import click

from master.deployment.stages import AUTO, ONE, lay_out
from master.planning.batch import BatchReport
from master.planning.home.batch import GroupBatchReport
from master.planning.home.dealing import HomeModel
from master.planning.home.flags import home_of, home_options, nodes_of_cards
from master.planning.home.members import Home
from master.planning.home.report import HomeReport
from master.planning.node import NodeFlags, PlannedNode, planned_node
from master.planning.problem import planning_case, request_of
from master.planning.report import PlanReport
from master.planning.shapes import ModelShape, model_shape
from master.workers.survey import measure_disks
from scheduler.model.home.problem import HomeSplit
from scheduler.model.home.solve import best_split, split_equally
from scheduler.model.machine import EXAMPLE, NodeMachine
from scheduler.model.offload.work import Workload
from tpi.config import ModelConfig, default_cache, parse_size
from tpi.devices.options import OffloadOptions, check_several
from tpi.errors import PlanError, UsageError
from tpi.flags import ModelCommand, model_argument
from tpi.kernels.kv import KV_DTYPES
from tpi.keys.policy import KeyPolicy
from tpi.paths import DIRECTORY, PATH
from tpi.progress import note, warn
from tpi.system.private import private
from tpi.text import json_text
from worker.plan.case import Case
from worker.plan.modes.batch import several_cards

_OF_ACCELERATORS = ("weights", "kv", "pipeline")


def refuse_pipeline(pipeline: str, batch: int) -> None:
    """Refuse a pipeline that would have no effect.

    Raises:
        UsageError: if `batch` is more than 1 and the pipeline is for single requests.
    """
    if batch > 1 and pipeline not in ("auto", "batch"):
        raise UsageError(
            f"--pipeline {pipeline} is for one request at a time, but --batch {batch} plans for many at once; "
            "leave one of them out"
        )


def refuse_idle(machine: NodeMachine, flags: dict[str, Any]) -> None:
    """Refuse a flag that has no effect on this machine, as `tpi run` does.

    Raises:
        UsageError: naming the flag.
    """
    given = [name for name in _OF_ACCELERATORS if flags[name] != "auto"]
    if given and not machine.cards:
        raise UsageError(
            f"--{given[0]} is for an accelerator, and this node has none; name one with --device or --machine, or "
            "leave the flag out"
        )
    described = flags["machine"] or (flags["device"] and all(name.startswith("emu") for name in flags["device"]))
    if flags["remeasure"] and described:
        raise UsageError("--remeasure measures this machine, and the plan is for one that is described; leave it out")


if TYPE_CHECKING:
    from master.planning.mtp import MtpForecast


@click.command(cls=ModelCommand)
@model_argument
@click.option("-m", "--model", help="A model as for `tpi run`, or a config.json alone: no weights are needed.")
@click.option("--machine", metavar="WORDS", help=f"Plan for a machine described in words, e.g. {EXAMPLE!r}.")
@click.option(
    "--device",
    multiple=True,
    metavar="NAME",
    help="Accelerators: opencl[:i], cuda[:i] or emu:...; auto: one that is found; cpu: none (default).",
)
@click.option(
    "--gpu-memory",
    multiple=True,
    metavar="SIZE",
    help="Limit of the accelerator's memory (default: all); once for each accelerator, or once for all.",
)
@click.option("--memory", metavar="SIZE", help="Limit of memory (default: the free memory).")
@click.option(
    "--weights", type=click.Choice(["auto", "gpu", "ram", "disk"]), default="auto", help="Where to store all weights."
)
@click.option("--kv", type=click.Choice(["auto", "gpu", "ram"]), default="auto", help="Where to store keys and values.")
@click.option(
    "--pipeline",
    type=click.Choice(["auto", "performance", "memory", "batch", "demand"]),
    default="auto",
    help="Load the next block while one is computed (performance), or one at a time (memory); batch: micro-batches of "
    "many requests; demand: load experts when a token chooses them.",
)
@click.option(
    "--dtype", default="auto", show_default=True, help="Format of the weights: auto, f32, bf16, q8, q4 or q4s."
)
@click.option("--kv-dtype", type=click.Choice(KV_DTYPES), help="Format of keys and values (default: as for tpi run).")
@click.option("-c", "--context", type=click.IntRange(min=1), help="Tokens of context (default: as for tpi run).")
@click.option("--prompt-tokens", type=click.IntRange(min=1), help="Length of a prompt (default: 512, or less).")
@click.option("--gen-tokens", type=click.IntRange(min=1), help="Length of an answer (default: 128, or less).")
@click.option(
    "--batch",
    default=1,
    show_default=True,
    type=click.IntRange(1, 4096),
    help="Requests at once; for more than 1, also plan how to batch them.",
)
@home_options
@click.option(
    "--stages",
    default=AUTO,
    show_default=True,
    metavar="auto|N|LAYOUT",
    help="Groups of machines that hold different layers, as for tpi run.",
)
@click.option("--draft", metavar="MODEL", help="Also count the memory of a draft model on this machine, in q4.")
@click.option("--svg", type=PATH, help="With --batch: draw this machine's roofs to a file.")
@click.option("--remeasure", is_flag=True, help="Measure this machine again.")
@click.option("--cache", type=DIRECTORY, help="Directory for packs and figures (default: ~/.cache/tpi).")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the table.")
def plan(model: str, dtype: str, as_json: bool, cache: Path | None, svg: Path | None, **flags: Any) -> None:
    """Show where weights would be stored and computed, and how fast that would be, without loading any."""
    if svg is not None and flags["batch"] == 1:
        raise UsageError("--svg draws the roofs of a batch; give --batch with the number of requests, such as 256")
    if svg is not None and (nodes_of_cards(flags) or any(flags[name] for name in ("devices", "topology", "workers"))):
        raise UsageError("--svg draws the roofs of one node; leave it out where several are named")
    refuse_pipeline(flags["pipeline"], flags["batch"])
    if svg is not None:
        _refuse_unwritable(svg)
    if home := home_of(flags, _node_flags(flags), cache or default_cache(), _files(cache or default_cache())):
        _plan_home(home, model, dtype, as_json, cache or default_cache(), flags)
        return
    _plan_node(model, dtype, as_json, cache or default_cache(), svg, flags)


def _plan_node(model: str, dtype: str, as_json: bool, cache: Path, svg: Path | None, flags: dict[str, Any]) -> None:
    shape, node, case = _case(model, dtype, cache, flags)
    refuse_idle(node.machine, flags)
    batch = _batch_report(node, case, svg, flags)
    report = None if flags["pipeline"] == "batch" else _report(shape, node, case, batch)
    if flags["draft"] is not None:
        _refuse_draft(shape, bool(node.machine.cards), _reads(case))
    mtp = _mtp(shape, case) if report and shape.mtp and flags["draft"] is None else None
    if mtp is not None:
        note(mtp.words())
    if batch is not None and svg is not None:
        _draw(svg, shape, batch)
    if as_json:
        fields = report.fields() | {"mtp": mtp.fields() if mtp else None} if report else {}
        click.echo(json_text(fields | ({"batch": batch.fields()} if batch else {})))
        return
    from master.planning.table import print_batch, print_plan

    if report:
        print_plan(report)
    if batch:
        print_batch(batch)


def _batch_report(node: PlannedNode, case: Case, svg: Path | None, flags: dict[str, Any]) -> BatchReport | None:
    """Return the plan of micro-batches; None without --batch or, with a warning, if a run would not batch.

    Raises:
        PlanError: if nothing fits, or if `--pipeline batch` or `--svg` is given and a run would make no micro-batches.
    """
    insists = flags["pipeline"] == "batch"
    if flags["batch"] == 1 and not insists:
        return None
    if why := several_cards(node.machine) or _without_batches(case.plan.config):
        if insists or svg is not None:
            raise PlanError(why)
        warn(f"the plan is without micro-batches: {why}")
        return None
    return BatchReport.of(case, flags["batch"])


def _without_batches(config: ModelConfig) -> str:
    """Return the reason why a run of this model makes no micro-batches; empty if it may make them."""
    if part := config.host_only:
        return f"the {part} of {config.family} models cannot be computed in micro-batches; leave --batch out"
    return ""


def _case(model: str, dtype: str, cache: Path, flags: dict[str, Any]) -> tuple[ModelShape, PlannedNode, Case]:
    node = planned_node(_node_flags(flags), cache, _files(cache))
    machine = node.machine
    machine = replace(machine, memory=max(1, machine.memory - _draft_bytes(machine, cache, flags)))
    room = machine.memory + sum(card.memory for card in machine.cards)
    shape = model_shape(model, dtype, cache, room)
    lay_out(flags["stages"], ["master"], shape.config.stage_cuts, [1.0])  # refuses stages that need several machines
    if machine.cards and (part := shape.config.host_only):
        warn(f"the accelerator is left out: only the CPU computes the {part} of {shape.config.family} models")
        machine = replace(machine, accelerator=None, more=())
    node = replace(node, machine=machine)
    options = OffloadOptions(flags["weights"], flags["kv"], flags["pipeline"])
    return shape, node, planning_case(shape, node.machine, _request(shape, flags), options, flags["kv_dtype"])


def _draft_bytes(machine: NodeMachine, cache: Path, flags: dict[str, Any]) -> int:
    if flags["draft"] is None:
        return 0
    from master.planning.draft import draft_bytes  # late: it imports the code that loads draft models

    return draft_bytes(flags["draft"], cache, machine, flags["context"])


def _refuse_draft(shape: ModelShape, accelerated: bool, reads: bool) -> None:
    from master.planning.draft import refuse_draft  # late: it imports the code that loads draft models

    refuse_draft(shape, accelerated, reads)


def _reads(case: Case) -> bool:
    """Return True if a node without an accelerator reads weights from its disk for each token."""
    return case.accelerated is None and case.host_budget[0].placement.streamed_bytes > 0


def _mtp(shape: ModelShape, case: Case) -> "MtpForecast | None":
    """Return the forecast for the layer for multi-token prediction; None if a run would not draft."""
    if case.accelerated is not None or (shape.config.mixture and _reads(case)):
        return None
    from master.planning.mtp import MtpForecast  # late: it imports the code that loads the layer

    assert case.machine is not None
    assert case.request is not None
    kv_dtype = case.plan.options.kv_dtype
    return MtpForecast.of(shape, case.machine, case.host_budget[0].used, case.request, kv_dtype)


def _request(shape: ModelShape, flags: dict[str, Any]) -> Workload:
    names = ("prompt_tokens", "gen_tokens", "batch", "context")
    return request_of(shape.config, *(flags[name] for name in names))


def _files(cache: Path) -> list[Path]:
    """Return the model files in the cache, on which the speed of the disk is measured."""
    return sorted((cache / "packs").glob("*/*.safetensors"))


def _plan_home(
    home: Home, model: str, dtype: str, as_json: bool, cache: Path, flags: dict[str, Any], measured: bool = False
) -> None:
    """Plan the model on the machines of a home; print each machine's part and the speed.

    If workers would read from unmeasured disks, let the workers measure their disks first, unless `measured` is True.
    """
    home = home.without_bytes(_draft_bytes(home.machines[0], cache, flags))
    room = sum(machine.memory for machine in home.machines)
    shape = model_shape(model, dtype, cache, room, len(home.machines))
    shape = shape if flags["draft"] is None else replace(shape, mtp=())  # the draft model takes the layer's place
    home = replace(home, cards=()) if shape.config.host_only else home
    staged = flags["stages"] not in (AUTO, ONE)
    asked = HomeModel(shape, home, _request(shape, flags), flags["kv_dtype"], flags["batch"])
    left = (several_cards(machine) for machine in home.batching)
    if flags["batch"] > 1 and (why := next(filter(None, (_without_batches(shape.config), *left)), "")):
        raise PlanError(why)
    batched = not staged and (flags["batch"] > 1 or flags["pipeline"] == "batch")
    report = None if home.cards and batched else _home_report(asked, not flags["workers"], flags["stages"])
    if flags["draft"] is not None:
        _refuse_draft(shape, bool(home.cards), report is not None and report.ahead.reads)
    if report and report.ahead.reads and home.unknown_disks and not measured:
        measure_disks(home.unknown_disks, KeyPolicy(locked=not flags["no_keys"]))
        again = home_of({**flags, "remeasure": False}, _node_flags(flags), cache, _files(cache))
        assert again is not None
        _plan_home(again, model, dtype, as_json, cache, flags, measured=True)
        return
    if report and report.mtp:
        note(report.mtp.words())
    batch = GroupBatchReport.of(asked, _dealt(asked, equally=nodes_of_cards(flags))) if batched else None
    if as_json:
        fields = report.fields() if report else {}
        click.echo(json_text(fields | ({"batch": batch.fields()} if batch else {})))
        return
    from master.planning.home.table import print_home
    from master.planning.table import print_batch

    if report:
        print_home(report)
    if batch:
        print_batch(batch)


def _home_report(asked: HomeModel, drop: bool, stages: str) -> HomeReport | None:
    """Return the report for all requests at once; None if the requests do not fit and are batched instead.

    With `drop`, nodes that make a token slower are left out. `stages` is the value of `--stages`.
    """
    try:
        return HomeReport.of(asked, drop, stages)
    except PlanError:
        if asked.request.sequences == 1 or stages not in (AUTO, ONE):
            raise
        return None


def _dealt(asked: HomeModel, equally: bool) -> HomeSplit:
    """Return the split that is made for a single request; with `equally`, equal parts for all nodes, if they fit."""
    problem = replace(asked, request=replace(asked.request, sequences=1)).problem
    found = split_equally(problem, tuple(range(len(problem.nodes)))) if equally else None
    return found or best_split(problem, drop=not equally)


def _report(shape: ModelShape, node: PlannedNode, case: Case, batch: BatchReport | None) -> PlanReport | None:
    """Return the report for all requests at once; None if they do not fit and are batched instead."""
    try:
        return PlanReport.of(shape, node, case)
    except PlanError:
        if batch is None:
            raise
        return None


def _draw(svg: Path, shape: ModelShape, batch: BatchReport) -> None:
    from master.planning.chart import draw_charts
    from master.planning.roofs import charts_of

    with _writing(svg, "w") as file:
        file.write(draw_charts(charts_of(batch.problem, batch.forecast.policy, shape.config.head_dim)))


def _refuse_unwritable(svg: Path) -> None:
    """Raise UsageError if `svg` cannot be written; change nothing."""
    fresh = not svg.exists()
    with _writing(svg, "a"):
        pass
    if fresh:
        svg.unlink()


@contextmanager
def _writing(svg: Path, mode: Literal["w", "a"]) -> Iterator[TextIO]:
    try:
        with open(svg, mode, opener=private) as file:
            yield file
    except OSError as error:
        raise UsageError(f"{svg} cannot be written: {error.strerror}; give --svg another file") from None


def _node_flags(flags: dict[str, Any]) -> NodeFlags:
    memory = None if flags["memory"] is None else _size("--memory", flags["memory"])
    gpu_memory = tuple(_size("--gpu-memory", size) for size in flags["gpu_memory"])
    check_several(flags["device"], flags["gpu_memory"])
    return NodeFlags(flags["machine"], flags["device"], memory, gpu_memory, flags["remeasure"])


def _size(flag: str, text: str) -> int:
    """Return the bytes in the text of a flag.

    Raises:
        UsageError: if the text is not a size, or the size is 0.
    """
    if not (size := parse_size(text, flag)):
        raise UsageError(f"{flag} 0 leaves nothing to plan with; give for example 600MiB or 4GiB")
    return size
