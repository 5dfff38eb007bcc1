"""How a node is to use its accelerator: what the command line's flags and a worker's profile say of it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, get_args

import click

from tpi.config import parse_size
from tpi.errors import UsageError

Command = TypeVar("Command", bound=Callable[..., Any])
_OF_ACCELERATORS = ("weights", "kv", "pipeline", "crossover")

Weights = Literal["auto", "gpu", "ram", "disk"]
KvPlace = Literal["auto", "gpu", "ram"]
Pipelining = Literal["auto", "performance", "memory", "batch", "demand"]


@dataclass(frozen=True)
class OffloadOptions:
    """`auto` and None are chosen by predicted time among what fits.

    Attributes:
        weights: gpu: all stay in the accelerator's memory; ram, disk: all come from there for every use.
        kv: where keys and values live.
        pipeline: performance: the next segment is loaded while one is computed; memory: one at a time; batch: many
            sequences in micro-batches (docs/batching.md); demand: experts come as they are wanted (docs/experts.md).
        crossover: tokens of a step from which on what streams is taken to the accelerator; shorter ones compute it on
            the host.
        many: whether many requests wait, none of which anybody watches: then `auto` may mean `batch`.
    """

    weights: Weights = "auto"
    kv: KvPlace = "auto"
    pipeline: Pipelining = "auto"
    crossover: int | None = None
    many: bool = False

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
    """Which devices compute beside the host, how much of their memory they may use, and for what.

    Attributes:
        devices: their names; `auto` and `cpu` stand alone.
        gpu_memory: bytes for each device, or for every one of them; empty: all that they have.
    """

    devices: tuple[str, ...] = ("auto",)
    gpu_memory: tuple[int, ...] = ()
    offload: OffloadOptions = field(default_factory=OffloadOptions)

    @classmethod
    def from_flags(cls, flags: dict[str, Any]) -> "DeviceOptions":
        """Take the flags of `device_options` out of `flags`.

        Raises:
            UsageError: if a size is malformed, or flags of an accelerator come without one.
        """
        devices, sizes = flags.pop("device") or ("auto",), flags.pop("gpu_memory")
        given = {name: flags.pop(name) for name in _OF_ACCELERATORS}
        check_several(devices, sizes)
        asked = cls(tuple(devices), tuple(parse_size(size, "--gpu-memory") for size in sizes), OffloadOptions(**given))
        if devices == ("cpu",):
            asked.refuse_flags("--device cpu uses none; drop one of them")
        return asked

    def refuse_flags(self, why: str) -> None:
        """Refuse flags about an accelerator where there is none; `why` ends the sentence.

        Raises:
            UsageError: if there are such flags.
        """
        if named := self.about_accelerator:
            raise UsageError(f"--{named[0]} is about an accelerator, and {why}")

    @property
    def about_accelerator(self) -> list[str]:
        """The flags that say something of an accelerator."""
        asked = [name for name in _OF_ACCELERATORS if getattr(self.offload, name) not in (None, "auto")]
        return [*asked, *(["gpu-memory"] if self.gpu_memory else [])]

    @property
    def limits(self) -> list[tuple[str, int | None]]:
        """Each device with the bytes of its memory that may be used; None: all."""
        memory: tuple[int | None, ...] = self.gpu_memory or (None,)
        every = memory if len(memory) > 1 else memory * len(self.devices)
        return list(zip(self.devices, every, strict=True))

    @property
    def arguments(self) -> list[str]:
        """The flags that say this."""
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
    """Whether these may be named beside each other, with so many limits.

    Raises:
        UsageError: if not.
    """
    alone = [name for name in devices if name in ("auto", "cpu")]
    if alone and len(devices) > 1:
        raise UsageError(f"--device {alone[0]} stands alone; name each card instead, such as cuda:0 and cuda:1")
    if len({name.startswith("emu") for name in devices}) > 1:
        raise UsageError("a node is emulated as a whole, or not at all; name real devices alone, or emu:... alone")
    if len(sizes) > 1 and len(sizes) != len(devices):
        raise UsageError(
            f"--gpu-memory is given {len(sizes)} times and --device {len(devices)}; give it once, or for each device"
        )


def device_options(command: Command) -> Command:
    """Flags that say what computes beside the host."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


_OPTIONS = (
    click.option(
        "--device",
        multiple=True,
        metavar="NAME",
        help="What computes beside the CPU: auto (default), cpu, opencl[:N], cuda[:N], or emu:... (docs/devices.md); "
        "repeat it for several cards.",
    ),
    click.option(
        "--gpu-memory",
        multiple=True,
        metavar="SIZE",
        help="Most of its memory to use, e.g. 6GiB (default: all of it); once for each device, or once for all.",
    ),
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
        help="performance: load the next block while one computes; memory: one block at a time; batch: many requests; "
        "demand: experts as they are wanted.",
    ),
    click.option(
        "--crossover",
        type=click.IntRange(min=1),
        help="Tokens of a step from which on streamed weights go to the device (default: as measured).",
    ),
)
