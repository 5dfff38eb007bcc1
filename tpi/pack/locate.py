"""From what the user typed after `-m` to a model on disk, and from there to an open pack."""

from collections.abc import Callable
from pathlib import Path

from tpi.pack.reader import Pack

Progress = Callable[[str, int, int], None]  # (what is being done, done so far, in all)


def open_model(spec: str, dtype: str, cache: Path, progress: Progress | None = None) -> Pack:
    """The model that `spec` names, packed into `cache` if it is not there yet.

    Args:
        spec: an alias (smollm2-135m), a Hugging Face directory, a .gguf file, a pack directory, or a hub id.
        dtype: auto, f32, bf16, q8, q4 or q4s; a pack directory is taken as it is.
        cache: the directory that holds `packs/` and downloaded models.
        progress: called as `progress(what, done, total)` with counts of bytes; not called where nothing is to be done.

    Raises:
        ModelError: if the model is unknown, damaged or not supported.
        WeightsError: if a block of an existing pack is missing, or the disk is full.
    """
    raise NotImplementedError
