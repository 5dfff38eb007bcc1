"""Writers of quantised safetensors by their specifications: codes, scales, zero points, and the exact values."""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]
Tensors = dict[str, torch.Tensor]
Writer = Callable[[str, F32], tuple[Tensors, F32]]
"""Returns the tensors of a module and its exact values, from its name and weights `[rows, columns]`."""

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
_AWQ = (0, 2, 4, 6, 1, 3, 5, 7)  # the columns of 8 whose codes follow one another in a word


@dataclass(frozen=True)
class Coded:
    """Codes `[rows, columns]`, and a scale and a zero for each group, `[rows, groups]`."""

    codes: U8
    scales: F32
    zeros: U8
    groups: npt.NDArray[np.intp]  # of columns

    @property
    def values(self) -> F32:
        """The exact weights."""
        zeros = self.zeros[:, self.groups].astype(np.float32)
        return np.asarray((self.codes.astype(np.float32) - zeros) * self.scales[:, self.groups], np.float32)


def coded(weights: F32, bits: int, group: int, symmetric: bool, groups: npt.NDArray[np.intp] | None = None) -> Coded:
    """Return weights as codes of `bits` bits with f16 scales; `group` columns share a scale (-1: the whole row)."""
    columns = weights.shape[1]
    size = columns if group == -1 else group
    groups = np.arange(columns) // size if groups is None else groups
    count, top, middle = int(groups.max()) + 1, (1 << bits) - 1, 1 << (bits - 1)
    scales, zeros = np.zeros((len(weights), count), np.float32), np.full((len(weights), count), middle, np.uint8)
    for number in range(count):
        part = weights[:, groups == number]
        if symmetric:
            scale = np.abs(part).max(axis=1) / max(middle - 1, 1)
        else:
            low, high = np.minimum(part.min(axis=1), 0), np.maximum(part.max(axis=1), 0)
            scale = (high - low) / top
            zeros[:, number] = np.clip(np.rint(-low / scale), 1, top)
        scales[:, number] = scale.astype(np.float16)
    codes = np.clip(np.rint(weights / scales[:, groups]) + zeros[:, groups], 0, top).astype(np.uint8)
    return Coded(codes, scales, zeros, groups)


def packed(codes: U8, bits: int) -> torch.Tensor:
    """Return each row of codes packed densely into int32 words, the low bits first."""
    each = codes[..., None] >> np.arange(bits, dtype=np.uint8) & np.uint8(1)
    stream = each.reshape(len(codes), -1)
    whole = np.pad(stream, ((0, 0), (0, -stream.shape[1] % 32)))
    return torch.from_numpy(np.packbits(whole, axis=1, bitorder="little").view(np.int32).copy())


def half(values: F32) -> torch.Tensor:
    """Return float16 of values that are float16 already."""
    return torch.from_numpy(values.astype(np.float16))


def gptq(bits: int, group: int, symmetric: bool, version: int = 1, reordered: bool = False) -> Writer:
    """Return a writer of GPTQ's tensors."""

    def write(module: str, weights: F32) -> tuple[Tensors, F32]:
        columns = weights.shape[1]
        size = columns if group == -1 else group
        of_columns = np.arange(columns) // size
        if reordered:
            of_columns = np.random.default_rng(columns).permutation(of_columns)
        made = coded(weights, bits, group, symmetric, of_columns)
        stored = (made.zeros - np.uint8(version == 1)) & np.uint8((1 << bits) - 1)
        return {
            f"{module}.qweight": packed(made.codes, bits).T.contiguous(),
            f"{module}.qzeros": packed(np.ascontiguousarray(stored.T), bits),
            f"{module}.scales": half(made.scales).T.contiguous(),
            f"{module}.g_idx": torch.from_numpy(of_columns.astype(np.int32)),
        }, made.values

    return write


def awq(group: int) -> Writer:
    """Return a writer of AWQ's tensors, packed for matrix products."""

    def words(codes: U8) -> torch.Tensor:
        return packed(np.ascontiguousarray(codes.reshape(len(codes), -1, 8)[:, :, _AWQ].reshape(codes.shape)), 4)

    def write(module: str, weights: F32) -> tuple[Tensors, F32]:
        made = coded(weights, 4, group, False)
        return {
            f"{module}.qweight": words(np.ascontiguousarray(made.codes.T)),
            f"{module}.qzeros": words(np.ascontiguousarray(made.zeros.T)),
            f"{module}.scales": half(made.scales).T.contiguous(),
        }, made.values

    return write


def compressed(bits: int, group: int, symmetric: bool, int8: bool = False, reordered: bool = False) -> Writer:
    """Return a writer of compressed-tensors' integers, packed or as int8."""

    def write(module: str, weights: F32) -> tuple[Tensors, F32]:
        rows, columns = weights.shape
        of_columns = np.arange(columns) // (columns if group == -1 else group)
        if reordered:
            of_columns = np.random.default_rng(rows).permutation(of_columns)
        made = coded(weights, bits, group, symmetric, of_columns)
        tensors = {f"{module}.weight_scale": torch.from_numpy(made.scales)}
        middle = 1 << (bits - 1)
        if int8:
            tensors[f"{module}.weight"] = torch.from_numpy((made.codes.astype(np.int16) - middle).astype(np.int8))
        else:
            tensors[f"{module}.weight_packed"] = packed(made.codes, bits)
            tensors[f"{module}.weight_shape"] = torch.tensor([rows, columns])
        if not symmetric:
            zeros = (made.zeros.astype(np.int16) - middle).astype(np.int8)
            words = packed(np.ascontiguousarray(made.zeros.T), bits).T.contiguous()
            tensors[f"{module}.weight_zero_point"] = torch.from_numpy(zeros) if int8 else words
        if reordered:
            tensors[f"{module}.weight_g_idx"] = torch.from_numpy(of_columns.astype(np.int32))
        return tensors, made.values

    return write


def mlx(bits: int, group: int) -> Writer:
    """Return a writer of MLX's tensors."""

    def write(module: str, weights: F32) -> tuple[Tensors, F32]:
        rows, columns = weights.shape
        parts = weights.reshape(rows, -1, group)
        minima = parts.min(axis=2).astype(np.float16).astype(np.float32)
        scales = ((parts.max(axis=2) - minima) / ((1 << bits) - 1)).astype(np.float16).astype(np.float32)
        codes = np.clip(np.rint((parts - minima[..., None]) / scales[..., None]), 0, (1 << bits) - 1).astype(np.uint8)
        words = packed(codes.reshape(rows, columns), bits).view(torch.uint32)
        values = codes * scales[..., None] + minima[..., None]
        tensors = {f"{module}.weight": words, f"{module}.scales": half(scales), f"{module}.biases": half(minima)}
        return tensors, np.asarray(values.reshape(rows, columns), np.float32)

    return write


def _e2m1(weights: F32, scales: F32) -> U8:
    """Return the codes of the e2m1 numbers that are closest to weights `[rows, groups, n]` over their scales."""
    wanted = weights / np.where(scales > 0, scales, 1)[..., None]
    return np.asarray(np.abs(wanted[..., None] - E2M1).argmin(axis=-1), np.uint8)


def nvfp4(
    divided: bool, names: tuple[str, str, str] = ("weight_packed", "weight_scale", "weight_global_scale")
) -> Writer:
    """Return a writer of NVFP4 tensors: codes, e4m3 scales, and a shared scale, which divides or multiplies."""

    def write(module: str, weights: F32) -> tuple[Tensors, F32]:
        rows, columns = weights.shape
        parts = weights.reshape(rows, -1, 16)
        shared = torch.tensor([np.abs(weights).max() / (6 * 448)], dtype=torch.float32)
        stored = 1 / shared if divided else shared
        wanted = torch.from_numpy(np.abs(parts).max(axis=2)) / 6
        scales = (wanted * stored if divided else wanted / stored).to(torch.float8_e4m3fn)
        exact = (scales.float() / stored if divided else scales.float() * stored).numpy()
        codes = _e2m1(parts, exact).reshape(rows, columns)
        halves = torch.from_numpy(codes[:, ::2] | codes[:, 1::2] << np.uint8(4))
        held = dict(zip(names, (halves, scales, stored), strict=True))
        values = E2M1[codes].reshape(parts.shape) * exact[..., None]
        return {f"{module}.{name}": tensor for name, tensor in held.items()}, values.reshape(rows, columns)

    return write


def mxfp4(module: str, weights: F32) -> tuple[Tensors, F32]:
    """Return compressed-tensors' MXFP4 tensors of a module, and its exact values."""
    rows, columns = weights.shape
    parts = weights.reshape(rows, -1, 32)
    exponents = np.floor(np.log2(np.abs(parts).max(axis=2))) - 2 + 127
    exact = np.exp2(exponents - 127).astype(np.float32)
    codes = _e2m1(parts, exact).reshape(rows, columns)
    return {
        f"{module}.weight_packed": torch.from_numpy(codes[:, ::2] | codes[:, 1::2] << np.uint8(4)),
        f"{module}.weight_scale": torch.from_numpy(exponents.astype(np.uint8)),
    }, np.asarray((E2M1[codes].reshape(parts.shape) * exact[..., None]).reshape(rows, columns), np.float32)


def write_quantised(
    model: Path, out: Path, writer: Writer, fields: Mapping[str, Any],
    chosen: Callable[[str], bool] = lambda name: name.endswith("_proj.weight"),
) -> tuple[Path, Path]:  # fmt: skip
    """Write a model with quantised linear layers to `out`/coded, and the same with exact float32 values to `out`/plain.

    `fields` are added to config.json of the quantised model. `chosen` takes a weight's name, and returns True to
    quantise it.
    """
    held, plain = load_file(model / "model.safetensors"), load_file(model / "model.safetensors")
    for name in [name for name in held if chosen(name) and held[name].dim() == 2]:
        tensors, values = writer(name.removesuffix(".weight"), held.pop(name).float().numpy())
        held |= tensors
        plain[name] = torch.from_numpy(np.ascontiguousarray(values))
    for folder, saved, extra in ((out / "coded", held, fields), (out / "plain", plain, {})):
        shutil.copytree(model, folder)
        save_file(saved, folder / "model.safetensors")
        found = json.loads((model / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**found, **extra}))
    return out / "coded", out / "plain"
