"""The check that refuses, before anything is computed, a model that an accelerator's kernels do not support."""

from typing import Protocol, runtime_checkable

from tpi.config import ModelConfig
from tpi.devices.base import Device
from tpi.errors import PlanError


@runtime_checkable
class PlainModels(Protocol):
    """Kernels that may lack attention sinks, the clamped SwiGLU, MXFP4 and latent vectors.

    Attributes:
        plain_models: True if these kernels lack them.
    """

    plain_models: bool


def check_model(device: Device, config: ModelConfig) -> None:
    """Raise a PlanError if `device` does not support an operation that `config` needs."""
    if config.value_norm:
        raise PlanError(f"{device.name} does not support normed values ({config.family} models); use --device cpu")
    if config.output_gate or any(config.recurrent):
        what = "recurrent layers" if any(config.recurrent) else "gates of heads"
        raise PlanError(f"{device.name} does not support {what} ({config.family} models); use --device cpu")
    limited = isinstance(device.kernels, PlainModels) and device.kernels.plain_models
    if limited and config.activation == "swiglu_clamped":
        raise PlanError(
            f"{device.name} does not support attention sinks and experts of {config.family} models; use --device cpu"
        )
    if limited and config.latent is not None:
        raise PlanError(f"{device.name} does not support latent vectors ({config.family} models); use --device cpu")
