"""Models of the Hugging Face hub, by id."""

from pathlib import Path

from tpi.errors import ModelError
from tpi.progress import Phase, phase
from tpi.system.fulldisk import is_full, write_error

_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt"]


def hub_snapshot(name: str, progress: Phase = phase) -> Path:
    """The directory of a model of the Hugging Face hub, from the local cache or downloaded.

    Raises:
        ModelError: if it is not there and cannot be downloaded.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        found = Path(snapshot_download(name, allow_patterns=_HUB_FILES, local_files_only=True))
        if (found / "config.json").exists():
            return found
    except (LocalEntryNotFoundError, OSError, ValueError):
        pass  # not there yet
    try:
        with progress(f"downloading {name}"):
            return Path(snapshot_download(name, allow_patterns=_HUB_FILES))
    except Exception as error:  # the library raises whatever its HTTP client does
        if isinstance(error, OSError) and is_full(error):
            raise write_error(error.filename or f"the files of {name}", error, "free space or set HF_HOME") from error
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ModelError(
            f"there is no directory {name}, and it cannot be fetched from the Hugging Face hub ({reason[0][:200]}); "
            "check the name and the network, or give a local directory"
        ) from error
