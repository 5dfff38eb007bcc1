"""List of all benchmarks: the function, the code that it measures, the time that it takes and its requirements."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

from benchmarks.result import Result

RUNTIME = ("tpi", "allreduce", "scheduler", "worker", "master")
ONE_NODE = ("tpi", "scheduler", "worker", "master")
HOME = (*RUNTIME, "testbed")


@dataclass(frozen=True)
class Benchmark:
    """One benchmark. `target` is `module:function`, a function that takes `quick` and returns a `Result`.

    `code` lists the folders and files that it measures, in addition to its own module. `minutes` is its approximate
    time on two cores. `needs` describes its requirements for people. The benchmark is left out if one of the modules
    `extras` is missing, or if it needs `root` and is started by another user.
    """

    target: str
    code: tuple[str, ...]
    minutes: float
    needs: str = ""
    extras: tuple[str, ...] = ()
    root: bool = False
    quick: bool = True  # `--quick` without names runs it; False if it first makes a large model

    @property
    def module(self) -> str:
        """Module of the benchmark's function."""
        return self.target.partition(":")[0]

    @property
    def measures(self) -> tuple[str, ...]:
        """Folders and files, relative to the repository. If one of them changes, the figures count as old."""
        return (*self.code, f"{self.module.replace('.', '/')}.py")

    def load(self) -> Callable[[bool], Result]:
        """Import the benchmark's function."""
        bench: Callable[[bool], Result] = getattr(import_module(self.module), self.target.partition(":")[2])
        return bench


ROOT_AND_QUIET = "root, a quiet machine"
DISK = "10 GB of disk"

# the order is that of the document
BENCHMARKS = {
    "kernels": Benchmark("benchmarks.support.adapters:kernels", ("tpi/kernels", "benchmarks/speed/kernels.py"), 4),
    "attention": Benchmark("benchmarks.speed.attention:bench", ("tpi/kernels", "worker/measure/attention.py"), 0.5),
    "peers": Benchmark("benchmarks.speed.peers:bench", ONE_NODE, 12, "llama-cpp-python", ("llama_cpp",), quick=False),
    "quality": Benchmark(
        "benchmarks.accuracy.quality:bench",
        (*ONE_NODE, "tests/support/weights/floats.py", "benchmarks/support/gguf_copy.py"),
        5,
        "llama-cpp-python for its half of the table",
    ),
    "parity": Benchmark("benchmarks.accuracy.parity:bench", RUNTIME, 6),
    "differential": Benchmark(
        "benchmarks.accuracy.differential:bench",
        (
            "tpi",
            "master/deployment/planner.py",
            "tests/support/differential",
            "tests/support/weights/split.py",
        ),
        10,
    ),
    "two_nodes": Benchmark("benchmarks.speed.two_nodes:bench", RUNTIME, 8, quick=False),
    "startup": Benchmark("benchmarks.speed.startup:bench", RUNTIME, 2),
    "serving": Benchmark("benchmarks.serving.streams:bench", (*RUNTIME, "benchmarks/serving"), 6),
    "interop": Benchmark(
        "benchmarks.interop.bench:bench",
        ("master/api", "benchmarks/interop", "benchmarks/serving/server.py"),
        3,
        "Node and npm; installs clients from PyPI and npm",
        quick=False,
    ),
    "crowd": Benchmark("benchmarks.serving.crowd:bench", (*RUNTIME, "benchmarks/serving"), 3),
    "links": Benchmark(
        "benchmarks.serving.links:bench", (*HOME, "benchmarks/serving"), 4, ROOT_AND_QUIET, root=True, quick=False
    ),
    "stream_peers": Benchmark(
        "benchmarks.serving.peers:bench",
        (*ONE_NODE, "benchmarks/serving"),
        3,
        "llama-cpp-python",
        ("llama_cpp",),
        quick=False,
    ),
    "left_alone": Benchmark("benchmarks.serving.left_alone:bench", (*RUNTIME, "benchmarks/serving"), 11),
    "idle": Benchmark("benchmarks.speed.idle:bench", RUNTIME, 17),
    "keys": Benchmark("benchmarks.trust.curve:bench", ("tpi/net", "tpi/keys", "allreduce"), 0.3),
    "recovery": Benchmark("benchmarks.trust.recovery:bench", (*RUNTIME, "benchmarks/trust/strikes.py"), 15),
    "streams": Benchmark("benchmarks.trust.streams:bench", (*RUNTIME, "benchmarks/trust/strikes.py"), 18),
    "fuzz": Benchmark("benchmarks.trust.fuzz:bench", ("tpi", "master/text/templates", "tests/support/fuzz"), 6),
    "strangers": Benchmark(
        "benchmarks.trust.strangers:bench",
        (*HOME, "tests/support/cluster/key_helpers.py"),
        3,
        "root",
        root=True,
        quick=False,
    ),
    "patience": Benchmark("benchmarks.trust.patience:bench", HOME, 61, "root", root=True, quick=False),
    "allreduce": Benchmark(
        "benchmarks.support.adapters:allreduce",
        ("allreduce", "tpi", "benchmarks/network/allreduce.py", "benchmarks/network/group_node.py"),
        3,
    ),
    "memory": Benchmark("benchmarks.memory.larger_than_memory:bench", ONE_NODE, 45, DISK),
    "offload": Benchmark(
        "benchmarks.memory.offload:bench", ONE_NODE, 10, f"root, accelerate, {DISK}", root=True, quick=False
    ),
    "pipeline": Benchmark("benchmarks.offloading.pipeline:bench", (*ONE_NODE, "benchmarks/offloading"), 12),
    "pipo": Benchmark("benchmarks.offloading.papers:bench", ("scheduler/model", "master/planning"), 0.5),
    "placements": Benchmark("benchmarks.offloading.placements:bench", (*ONE_NODE, "benchmarks/offloading"), 8),
    "neurons": Benchmark("benchmarks.sparsity.host:bench", ONE_NODE, 2, quick=False),
    "neurons_disk": Benchmark("benchmarks.sparsity.disk:bench", ONE_NODE, 3, "2 GB of disk", quick=False),
    "numbering": Benchmark("benchmarks.sparsity.numbering:bench", (*ONE_NODE, "benchmarks/sparsity/numbering.py"), 1),
    "hybrid": Benchmark("benchmarks.sparsity.hybrid:bench", (*ONE_NODE, "benchmarks/sparsity"), 8, quick=False),
    "sparse_figures": Benchmark("benchmarks.sparsity.figures:bench", ONE_NODE, 4, "torch", ("torch",), quick=False),
    "experts": Benchmark(
        "benchmarks.experts.memory:bench",
        (*ONE_NODE, "benchmarks/speed/experts.py"),
        8,
        "llama-cpp-python for half of it, 3 GB of disk",
        quick=False,
    ),
    "routing": Benchmark(
        "benchmarks.experts.routing:bench",
        ("scheduler/demand/choice", "tests/support/data/mixture"),
        1,
        "torch",
        ("torch",),
    ),
    "experts_disk": Benchmark("benchmarks.experts.disk:bench", ("scheduler", "tpi/devices"), 3, "1 GB of disk"),
    "experts_device": Benchmark("benchmarks.experts.device:bench", (*ONE_NODE, "benchmarks/experts"), 2, quick=False),
    "cgopipe": Benchmark("benchmarks.experts.cgopipe:bench", (*ONE_NODE, "benchmarks/experts"), 14),
    "divided": Benchmark("benchmarks.experts.divided:bench", (*ONE_NODE, "benchmarks/experts"), 4),
    "moelightning": Benchmark("benchmarks.experts.papers:bench", ("scheduler/model", "master/planning"), 2),
    "steady": Benchmark("benchmarks.memory.steady:bench", ONE_NODE, 8),
    "peaks": Benchmark("benchmarks.memory.peaks:bench", RUNTIME, 6, DISK, quick=False),
    "papers": Benchmark("benchmarks.memory.papers:bench", (*RUNTIME, "benchmarks/memory/unwritten.py"), 0.2),
    "seventy": Benchmark("benchmarks.memory.seventy:bench", RUNTIME, 15, "2 GB of disk", quick=False),
    "home_links": Benchmark("benchmarks.network.home_links:bench", HOME, 2, ROOT_AND_QUIET, root=True, quick=False),
    "home_network": Benchmark(
        "benchmarks.network.home_network:bench", HOME, 45, ROOT_AND_QUIET, root=True, quick=False
    ),
    "split": Benchmark(
        "benchmarks.network.split:bench",
        (*HOME, "benchmarks/network/home.py"),
        6,
        ROOT_AND_QUIET,
        root=True,
        quick=False,
    ),
    "home_prefill": Benchmark("benchmarks.network.home_prefill:bench", HOME, 6, ROOT_AND_QUIET, root=True, quick=False),
    "homes": Benchmark(
        "benchmarks.network.homes:bench",
        (*HOME, "benchmarks/network/home.py", "benchmarks/network/forecast.py"),
        20,
        ROOT_AND_QUIET,
        root=True,
        quick=False,
    ),
    "tensor_parallel": Benchmark(
        "benchmarks.network.tensor_parallel:bench",
        (*HOME, "benchmarks/network/layerwise.py"),
        30,
        f"{ROOT_AND_QUIET}, {DISK}",
        root=True,
        quick=False,
    ),
}
