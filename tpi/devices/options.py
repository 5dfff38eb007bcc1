"""Options for a node's accelerators, from the command line's flags or a worker's profile."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar, get_args

import click

from tpi.config import parse_size
from tpi.devices.emulated.machine import part_of_emulated
from tpi.errors import UsageError

Command = TypeVar("Command", bound=Callable[..., Any])
_OF_ACCELERATORS = ("weights", "kv", "pipeline", "crossover")

Weights = Literal["auto", "gpu", "ram", "disk"]
KvPlace = Literal["auto", "gpu", "ram"]
Pipelining = Literal["auto", "performance", "memory", "batch", "demand"]


@dataclass(frozen=True)
class OffloadOptions:
    """Options for the use of an accelerator. With `auto` and None, TPI chooses by predicted time.

    Attributes:
        weights: gpu: all weights stay in the accelerator's memory; ram, disk: all are read from there at every use.
        kv: where keys and values live.
        pipeline: performance: load the next segment while one is computed; memory: one segment at a time; batch: many
            sequences in micro-batches (docs/batching.md); demand: load experts once they are chosen (docs/experts.md).
        crossover: tokens of a step from which on streamed weights are copied to the accelerator; in shorter steps the
            host computes with them.
        unattended: True if many requests wait and none is interactive; `auto` may then choose `batch`.
    """

    weights: Weights = "auto"
    kv: KvPlace = "auto"
    pipeline: Pipelining = "auto"
    crossover: int | None = None
    unattended: bool = False

    @property
    def weights_tier(self) -> Literal["gpu", "ram", "disk"] | None:
        """The memory tier requested for all weights; None: TPI chooses."""
        return None if self.weights == "auto" else self.weights

    @property
    def kv_tier(self) -> Literal["gpu", "ram"] | None:
        """The memory tier requested for keys and values; None: TPI chooses."""
        return None if self.kv == "auto" else self.kv

    @property
    def pipeline_kind(self) -> Literal["performance", "memory"] | None:
        """The requested pipeline if it is performance or memory; None for auto, batch and demand."""
        return self.pipeline if self.pipeline in ("performance", "memory") else None


@dataclass(frozen=True)
class DeviceOptions:
    """The devices that compute in addition to the host, how much of their memory they may use, and for what.

    Attributes:
        devices: their names; `auto` and `cpu` must be the only one.
        gpu_memory: bytes, one for each device or one for all; empty: all of their memory.
    """

    devices: tuple[str, ...] = ("auto",)
    gpu_memory: tuple[int, ...] = ()
    offload: OffloadOptions = field(default_factory=OffloadOptions)

    @classmethod
    def from_flags(cls, flags: dict[str, Any]) -> "DeviceOptions":
        """Return the options that `flags` give, and remove the flags of `device_options` from it.

        Raises:
            UsageError: if a size is malformed, or flags of an accelerator come without one.
        """
        devices, sizes = flags.pop("device") or ("auto",), flags.pop("gpu_memory")
        given = {name: flags.pop(name) for name in _OF_ACCELERATORS}
        check_several(devices, sizes)
        asked = cls(tuple(devices), tuple(parse_size(size, "--gpu-memory") for size in sizes), OffloadOptions(**given))
        if devices == ("cpu",):
            asked.refuse_flags("--device cpu uses none; remove one of them")
        return asked

    def refuse_flags(self, why: str) -> None:
        """Refuse flags about an accelerator if there is none; `why` is the end of the error message.

        Raises:
            UsageError: if there are such flags.
        """
        if named := self.about_accelerator:
            raise UsageError(f"--{named[0]} is about an accelerator, and {why}")

    @property
    def about_accelerator(self) -> list[str]:
        """Names of the flags given by the user that apply only to an accelerator."""
        asked = [name for name in _OF_ACCELERATORS if getattr(self.offload, name) not in (None, "auto")]
        return [*asked, *(["gpu-memory"] if self.gpu_memory else [])]

    @property
    def limits(self) -> list[tuple[str, int | None]]:
        """Each device's name with the bytes of its memory that may be used; None: all."""
        memory: tuple[int | None, ...] = self.gpu_memory or (None,)
        every = memory if len(memory) > 1 else memory * len(self.devices)
        return list(zip(self.devices, every, strict=True))

    @property
    def apart(self) -> "tuple[DeviceOptions, ...]":
        """The options of one node for each card. The nodes share this machine: emulated hosts are divided equally."""
        count = len(self.devices)
        return tuple(
            replace(self, devices=(part_of_emulated(name, count),), gpu_memory=() if limit is None else (limit,))
            for name, limit in self.limits
        )

    @property
    def arguments(self) -> list[str]:
        """The command-line arguments that lead to these options."""
        offload = self.offload
        several = [("--device", name) for name in self.devices]
        several += [("--gpu-memory", f"{size}B") for size in self.gpu_memory]
        flags = {
            "--weights": offload.weights,
            "--kv": offload.kv,
            "--pipeline": offload.pipeline,
            "--crossover": offload.crossover,
        }
        given = [*several, *((name, str(value)) for name, value in flags.items() if value is not None)]
        return [word for name, value in given if value != "auto" for word in (name, value)]


def check_several(devices: Sequence[str], sizes: Sequence[str]) -> None:
    """Check that these devices may be named together, with these limits.

    Raises:
        UsageError: if the devices cannot be combined, or the number of limits is wrong.
    """
    alone = [name for name in devices if name in ("auto", "cpu")]
    if alone and len(devices) > 1:
        raise UsageError(
            f"--device {alone[0]} cannot be combined with other devices; name each card, such as cuda:0 and cuda:1"
        )
    if len({name.startswith("emu") for name in devices}) > 1:
        raise UsageError(
            "emulated and real devices cannot be combined in one node; name only real ones or only emu:... ones"
        )
    if len(sizes) > 1 and len(sizes) != len(devices):
        raise UsageError(
            f"--gpu-memory is given {len(sizes)} times and --device {len(devices)}; give it once, or for each device"
        )


def device_options(command: Command) -> Command:
    """Add the flags of the accelerators to a command."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


_OPTIONS = (
    click.option(
        "--device",
        multiple=True,
        metavar="NAME",
        help="Accelerator to use: auto (default), cpu (none), opencl[:N], cuda[:N], or emu:... (docs/devices.md); "
        "repeat it for several cards.",
    ),
    click.option(
        "--gpu-memory",
        multiple=True,
        metavar="SIZE",
        help="Limit to the device's memory, e.g. 6GiB (default: all of it); once for all devices or for each.",
    ),
    click.option(
        "--weights",
        type=click.Choice(get_args(Weights)),
        default="auto",
        show_default=True,
        help="Where all weights lie: on the device (gpu), in host memory (ram) or on disk; auto: by predicted time.",
    ),
    click.option(
        "--kv",
        type=click.Choice(get_args(KvPlace)),
        default="auto",
        show_default=True,
        help="Where keys and values live: on the device (gpu) or in host memory (ram).",
    ),
    click.option(
        "--pipeline",
        type=click.Choice(get_args(Pipelining)),
        default="auto",
        show_default=True,
        help="performance: load the next block while one is computed; memory: one block at a time; batch: many "
        "requests; demand: load experts once they are chosen.",
    ),
    click.option(
        "--crossover",
        type=click.IntRange(min=1),
        help="Tokens in a step from which on the device computes with streamed weights (default: as measured).",
    ),
)
