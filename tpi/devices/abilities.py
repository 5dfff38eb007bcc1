"""Which models an accelerator's own kernels do not know: they are refused by name before anything is computed."""

from typing import Protocol, runtime_checkable

from tpi.config import ModelConfig
from tpi.devices.base import Device
from tpi.errors import PlanError


@runtime_checkable
class PlainModels(Protocol):
    """Kernels that know neither attention sinks, nor the clamped SwiGLU, nor MXFP4, nor latent vectors."""

    plain_models: bool


def check_model(device: Device, config: ModelConfig) -> None:
    """Raise a PlanError if `device` does not compute what `config` asks for."""
    limited = isinstance(device.kernels, PlainModels) and device.kernels.plain_models
    if limited and config.activation == "swiglu_clamped":
        raise PlanError(
            f"{device.name} does not know attention sinks and the experts of {config.family} models; use --device cpu"
        )
    if limited and config.latent is not None:
        raise PlanError(f"{device.name} does not know the latent vectors of {config.family} models; use --device cpu")
