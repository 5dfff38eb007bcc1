"""Choice among the quantisations of a GGUF repository, by the memory that the model may use."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tpi.sources.ggufparts import gguf_name
from tpi.system.memory import available_memory

# The name of a quantisation in the name of a file. Q4_0_4_4 and similar ones are no longer in use.
_NAME = re.compile(r"(?:^|[-._])((?:UD-)?(?:(I?Q[2-8])_(?!\d_\d)\w+|MXFP4\w*))$", re.IGNORECASE)
# Without sizes, or if none fits, the first of these is used; if there is none of these, the first file by name.
_PREFERRED = ("Q4_K_M", "MXFP4", "Q4_K_S", "Q4_1", "Q4_0", "IQ4_NL", "IQ4_XS", "Q5_K_M", "Q6_K", "Q8_0", "BF16", "F16")
_PACKED = {"Q2": 1.35, "IQ2": 1.95, "Q3": 1.2, "IQ3": 1.5, "Q8": 1.05}  # upper limits of pack bytes / file bytes
_OTHERS_PACKED = 1.12
_SHARE = 0.9  # of the memory, for weights; the rest is for keys, values and activations
_GB = 1e9


@dataclass(frozen=True)
class HouseMemory:
    """Memory that a model may use: the bytes of all machines together, and the number of machines."""

    nbytes: float
    machines: int = 1

    def __str__(self) -> str:
        """Return words such as `the 11.2 GB free on 2 machines`."""
        whose = "this machine" if self.machines == 1 else f"{self.machines} machines"
        return f"the {self.nbytes / _GB:.1f} GB free on {whose}"


House = Callable[[], HouseMemory]


def this_machine() -> HouseMemory:
    """Return the memory that is free on this machine, less a tenth."""
    return HouseMemory(0.9 * available_memory())


def best_quantisation(sizes: Mapping[str, int], house: House) -> tuple[str, str]:
    """Return the best GGUF model that fits into the house's memory, and a phrase that says why.

    The phrase is empty if there is only one model.

    The largest file is the best, up to Q8_0: float files are used only if there is nothing else, and files of less than
    2 bits if nothing better fits.

    Args:
        sizes: bytes of all parts of each model, by its first file; 0 if they are not known.
        house: called if there is a choice.
    """
    files = sorted(sizes)
    if len(files) == 1:
        return files[0], ""
    known = {file: found for file in files if sizes[file] and (found := _NAME.search(gguf_name(Path(file))))}
    memory = house() if known else HouseMemory(0)
    held = [file for file, found in known.items() if _packed(sizes[file], found[2]) <= _SHARE * memory.nbytes]
    if held:
        best = max(held, key=lambda file: (sizes[file], file))
        return best, f"the best of {len(files)} that fits {memory}"
    usual = next((file for name in _PREFERRED for file in files if quantised_as(name, file)), files[0])
    why = f"one of {len(files)}"
    return usual, f"{why}, though none fits {memory}, so weights are read from disk" if known else why


def quantised_as(name: str, file: str) -> bool:
    """Return True if the name of a GGUF file ends in the name of this quantisation."""
    return re.search(rf"(^|[-._]){re.escape(name.lower())}$", gguf_name(Path(file)).lower()) is not None


def size_words(nbytes: int) -> str:
    """Return words such as ` (4.9 GB)`, or nothing if the size is not known."""
    return f" ({nbytes / _GB:.1f} GB)" if nbytes else ""


def _packed(nbytes: int, kind: str | None) -> float:
    return nbytes * _PACKED.get((kind or "").upper(), _OTHERS_PACKED)
