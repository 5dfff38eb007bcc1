"""How a node is to use its accelerator: what the command line's flags and a worker's profile say of it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, get_args

import click

from tpi.config import parse_size
from tpi.errors import UsageError

Command = TypeVar("Command", bound=Callable[..., Any])

Weights = Literal["auto", "gpu", "ram", "disk"]
KvPlace = Literal["auto", "gpu", "ram"]
Pipelining = Literal["auto", "performance", "memory", "batch"]


@dataclass(frozen=True)
class OffloadOptions:
    """`auto` and None are chosen by predicted time among what fits.

    Attributes:
        weights: gpu: all stay in the accelerator's memory; ram, disk: all come from there for every use.
        kv: where keys and values live.
        pipeline: performance: the next segment is loaded while one is computed; memory: one at a time; batch: many
            sequences in micro-batches (docs/batching.md).
        crossover: tokens of a step from which on what streams is taken to the accelerator; shorter ones compute it on
            the host.
    """

    weights: Weights = "auto"
    kv: KvPlace = "auto"
    pipeline: Pipelining = "auto"
    crossover: int | None = None

    @property
    def weights_tier(self) -> Literal["gpu", "ram", "disk"] | None:
        """Where all weights are to lie; None: choose."""
        return None if self.weights == "auto" else self.weights

    @property
    def kv_tier(self) -> Literal["gpu", "ram"] | None:
        """Where keys and values are to live; None: choose."""
        return None if self.kv == "auto" else self.kv

    @property
    def pipeline_kind(self) -> Literal["performance", "memory"] | None:
        """Which pipeline; None: choose, or it is one of batches, which is planned otherwise."""
        return self.pipeline if self.pipeline in ("performance", "memory") else None


@dataclass(frozen=True)
class DeviceOptions:
    """Which device computes beside the host, how much of its memory it may use (bytes; None: all), and for what."""

    device: str = "auto"
    gpu_memory: int | None = None
    offload: OffloadOptions = field(default_factory=OffloadOptions)

    @classmethod
    def from_flags(cls, flags: dict[str, Any]) -> "DeviceOptions":
        """Take the flags of `device_options` out of `flags`.

        Raises:
            UsageError: if a size is malformed, or flags of an accelerator come without one.
        """
        device, memory = flags.pop("device"), flags.pop("gpu_memory")
        given = {name: flags.pop(name) for name in ("weights", "kv", "pipeline", "crossover")}
        asked = [name for name, value in given.items() if value not in (None, "auto")]
        if device == "cpu" and (asked or memory):
            named = f"--{asked[0]}" if asked else "--gpu-memory"
            raise UsageError(f"{named} is about an accelerator, and --device cpu uses none; drop one of them")
        return cls(device, None if memory is None else parse_size(memory), OffloadOptions(**given))

    @property
    def arguments(self) -> list[str]:
        """The flags that say this."""
        offload = self.offload
        flags = {
            "--device": self.device,
            "--gpu-memory": self.gpu_memory,
            "--weights": offload.weights,
            "--kv": offload.kv,
            "--pipeline": offload.pipeline,
            "--crossover": offload.crossover,
        }
        return [word for name, value in flags.items() if value not in (None, "auto") for word in (name, str(value))]


def device_options(command: Command) -> Command:
    """Flags that say what computes beside the host."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


_OPTIONS = (
    click.option(
        "--device",
        default="auto",
        show_default=True,
        metavar="NAME",
        help="What computes beside the CPU: auto, cpu, opencl[:N], cuda[:N], or emu:... (docs/devices.md).",
    ),
    click.option("--gpu-memory", metavar="SIZE", help="Most of its memory to use, e.g. 6GiB (default: all of it)."),
    click.option(
        "--weights",
        type=click.Choice(get_args(Weights)),
        default="auto",
        show_default=True,
        help="Keep all weights on the device, in memory or on disk; auto: by predicted time.",
    ),
    click.option(
        "--kv",
        type=click.Choice(get_args(KvPlace)),
        default="auto",
        show_default=True,
        help="Where keys and values live.",
    ),
    click.option(
        "--pipeline",
        type=click.Choice(get_args(Pipelining)),
        default="auto",
        show_default=True,
        help="performance: load the next block while one computes; memory: one block at a time; batch: many requests.",
    ),
    click.option(
        "--crossover",
        type=click.IntRange(min=1),
        help="Tokens of a step from which on streamed weights go to the device (default: as measured).",
    ),
)
