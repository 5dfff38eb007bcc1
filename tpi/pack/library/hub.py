"""Models of the Hugging Face hub: found in its cache on this machine, or downloaded into it file by file."""

import json
import os
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path
from shutil import disk_usage
from typing import Any
from urllib.error import URLError
from urllib.parse import urlsplit

from tpi.errors import ModelError, TpiError, WeightsError
from tpi.pack.library.hubfiles import HubFiles, HubModel
from tpi.pack.library.quantisations import House, HouseMemory, this_machine
from tpi.paths import home
from tpi.progress import Phase, Progress, phase, warn
from tpi.system.atomic import write_atomically
from tpi.system.download import DamagedFileError, download, wants_more
from tpi.system.fulldisk import is_full, write_error

_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


def hub_model(
    model: HubModel, cache: Path, progress: Phase = phase, weights: bool = True, house: House = this_machine
) -> Path:
    """Return the directory or the GGUF file of a model, after downloading the files that are missing.

    If no file is missing, the hub is not contacted. An interrupted download resumes where it stopped.

    Args:
        model: the model that the user named.
        cache: TPI's cache, which stores lists of files. If there is no home directory it also stores the files.
        progress: starts a display of progress.
        weights: if False, the weights of a Hugging Face directory are not downloaded.
        house: returns the memory that the model may use, which decides between GGUF models if the user named none.

    Raises:
        ModelError: if there is no such model, or it cannot be downloaded.
        WeightsError: if the disk is full.
    """
    library = _library(cache)
    place = Path(library.HF_HUB_CACHE) / f"models--{model.repository.replace('/', '--')}"
    remembered = _Listing(model, cache, place)
    try:
        found = remembered.load(weights)
        if found and (path := found.complete(weights)):
            return path
        return _download(model, library, remembered, weights, progress, house)
    except TpiError:
        raise
    except Exception as error:  # the library also passes on the exceptions of its HTTP client
        raise _refusal(model, library, error) from error


class _Snapshot:
    """Files of one commit of a repository, in the cache of the Hugging Face hub. Some may be missing."""

    def __init__(self, directory: Path, files: HubFiles) -> None:
        self.directory, self.files = directory, files

    def missing(self, weights: bool) -> list[str]:
        """Return the files to download now. Once the model's index is downloaded, a second call may return more."""
        return [name for name in self.files.wanted(self.directory, weights) if not (self.directory / name).exists()]

    def complete(self, weights: bool) -> Path | None:
        return None if self.missing(weights) else self.path

    @property
    def path(self) -> Path:
        return self.directory / self.files.gguf[0] if self.files.gguf else self.directory


class _Listing:
    """List of a repository's files, known without contacting the hub.

    The list comes from TPI's cache or, if the cache has no list, from the files that other programs have downloaded.
    """

    def __init__(self, model: HubModel, cache: Path, place: Path) -> None:
        self._model, self._place = model, place
        name = f"{model.repository}@{model.revision}".replace("/", "--")
        self._file = cache / "hub" / f"{name}.json"

    def load(self, weights: bool) -> _Snapshot | None:
        """Return the files of the model; None if the hub has to be asked for them.

        If the user named none of several GGUF models, it is the one chosen before, or one that is on this machine.
        """
        commit, sizes, chosen = self._saved()
        model = replace(self._model, choice=self._model.choice or chosen)
        with suppress(ModelError):  # the repository may have more files by now
            files = HubFiles.choose(model, sizes, _unlimited)
            if model.choice or not files.gguf:
                return self.snapshot(commit, files)
        return self._of_others(commit, weights)

    def save(self, commit: str, sizes: Mapping[str, int], chosen: HubFiles) -> None:
        """Store the list of files of the commit `commit`.

        If the user did not choose one of several GGUF models, store also which one was chosen.
        """
        default = self._saved()[2] if self._model.choice else "".join(chosen.gguf[:1])
        with suppress(OSError):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self._file, json.dumps({"commit": commit, "files": sizes, "chosen": default}).encode())

    def snapshot(self, commit: str, files: HubFiles) -> _Snapshot:
        return _Snapshot(self._place / "snapshots" / commit, files)

    def _saved(self) -> tuple[str, dict[str, int], str]:
        """Return what is stored: the commit, the sizes of its files, and the chosen GGUF model.

        All three are empty if nothing is stored.
        """
        with suppress(OSError, ValueError, KeyError, TypeError):
            known = json.loads(self._file.read_bytes())
            sizes = {str(name): int(size) for name, size in dict(known["files"]).items()}
            return str(known["commit"]), sizes, str(known["chosen"])
        return "", {}, ""

    def _of_others(self, commit: str, weights: bool) -> _Snapshot | None:
        """Return the snapshot that another program has downloaded if it appears to hold a complete model, else None.

        If `weights` is False, it need not hold the weights of a Hugging Face directory.
        """
        with suppress(OSError, ValueError):
            commit = commit or (self._place / "refs" / self._model.revision).read_text().strip()
        directory = self._place / "snapshots" / (commit or self._model.revision)
        there = [file for file in directory.rglob("*") if file.is_file()]
        sizes = {file.relative_to(directory).as_posix(): file.stat().st_size for file in there}
        with suppress(ModelError):  # for example, if only half of the model is there
            found = _Snapshot(directory, HubFiles.choose(self._model, sizes, _unlimited))
            return found if found.files.has_tokenizer and found.complete(weights) else None
        return None


def _unlimited() -> HouseMemory:
    return HouseMemory(inf)


def _download(
    model: HubModel, library: Any, remembered: _Listing, weights: bool, progress: Phase, house: House
) -> Path:
    from huggingface_hub import HfApi

    info = HfApi().model_info(model.repository, revision=model.revision, files_metadata=True)
    commit, sizes = info.sha, {file.rfilename: file.size or 0 for file in info.siblings or ()}
    if not isinstance(commit, str) or not _COMMIT.fullmatch(commit):
        raise ModelError(f"the hub answers with an invalid commit {commit!r:.60} for {model.repository}; try again")
    files = HubFiles.choose(model, sizes, house)
    snapshot = remembered.snapshot(commit, files)
    if files.note:
        warn(f"{model.repository}: {files.note}")
    while missing := snapshot.missing(weights):
        _fetch_all(model, library, commit, {name: sizes[name] for name in missing}, progress)
    remembered.save(commit, sizes, files)
    return snapshot.path


def _fetch_all(model: HubModel, library: Any, commit: str, sizes: Mapping[str, int], progress: Phase) -> None:
    """Download files of a commit, and report the progress of all together; `sizes` has the bytes of each, by name.

    Raises:
        WeightsError: if the disk has too little space. Bytes that came earlier are counted.
    """
    blobs = Path(library.HF_HUB_CACHE) / f"models--{model.repository.replace('/', '--')}" / "blobs"
    blobs.mkdir(parents=True, exist_ok=True)
    there, total, done = sum(part.stat().st_size for part in blobs.glob("*.incomplete")), sum(sizes.values()), 0
    if total - there > (free := disk_usage(blobs).free):
        raise WeightsError(
            f"disk full: {model.repository} needs {(total - there) / 1e6:.0f} MB more and {blobs} has {free / 1e6:.0f} "
            "MB free; free space, or set HF_HOME to a directory on another disk"
        )
    with progress(f"downloading {model.repository}") as report:
        for name, size in sizes.items():
            _fetch(model, library, commit, name, blobs, partial(_add, report, done, total))
            report(done := done + size, total)


def _add(report: Progress, before: int, total: int, done: int, of_file: int) -> None:
    report(before + done, total)


def _fetch(model: HubModel, library: Any, commit: str, name: str, blobs: Path, report: Progress) -> None:
    """Download one file into the hub's cache.

    Large files, which are named by their SHA-256, resume where an earlier try stopped. Not all versions of the library
    can do that, so `tpi.system.download` fetches them, and the library then finds them in its cache.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url
    from huggingface_hub.utils import build_hf_headers

    file = get_hf_file_metadata(hf_hub_url(model.repository, name, revision=commit))
    if file.etag and _SHA256.fullmatch(file.etag):
        headers = {"User-Agent": "tpi"}
        if urlsplit(file.location).netloc == urlsplit(library.ENDPOINT).netloc:  # send a token only to the hub itself
            headers = build_hf_headers()
        try:
            download(file.location, blobs / file.etag, file.etag, headers, report)
        except OSError as error:
            if not wants_more(error):
                raise  # otherwise the library downloads the file below
    hf_hub_download(model.repository, name, revision=commit, cache_dir=library.HF_HUB_CACHE)


def _library(cache: Path) -> Any:
    """Return the constants of the library huggingface_hub.

    If the user has no home directory, the library's own cache is placed in `cache`.
    """
    if home() is None and "huggingface_hub" not in sys.modules:
        os.environ.setdefault("HF_HOME", str(cache.absolute() / "huggingface"))  # else it creates a directory named ~
    from huggingface_hub import constants
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()  # TPI shows its own for large files
    return constants


def _refusal(model: HubModel, library: Any, error: Exception) -> TpiError:
    """Return the TPI error for an exception of the library, with a message that says what to do."""
    from huggingface_hub.utils import (
        GatedRepoError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    name, host = model.repository, library.ENDPOINT
    if isinstance(error, OSError) and is_full(error):
        return write_error(error.filename or f"the files of {name}", error, "free space or set HF_HOME")
    if isinstance(error, OSError) and error.filename and not isinstance(error, URLError):  # not a network error
        return ModelError(
            f"files of {name} cannot be stored in the hub's cache ({error.strerror}: {error.filename}); set HF_HOME to "
            "a directory that can be written"
        )
    if isinstance(error, GatedRepoError):
        return ModelError(
            f"{name} is gated: accept its conditions at {host}/{name}, then log in (hf auth login) or set HF_TOKEN"
        )
    if isinstance(error, RevisionNotFoundError):
        return ModelError(f"{name} has no revision {model.revision!r}; give a branch, a tag or a commit after @")
    if isinstance(error, RepositoryNotFoundError):
        return ModelError(
            f"there is no directory {name}, and no model of that name at {host}, or it is private; check the name, or "
            "log in (hf auth login) or set HF_TOKEN"
        )
    if isinstance(error, OfflineModeIsEnabled) or (
        library.HF_HUB_OFFLINE and isinstance(error, LocalEntryNotFoundError)
    ):
        return ModelError(
            f"{name} is not completely in the hub's cache, and HF_HUB_OFFLINE is set; unset it to download the rest"
        )
    if isinstance(error, DamagedFileError):
        return ModelError(f"a file of {name} was damaged in transfer ({error}); check the network, and try again")
    reason = str(error).strip().splitlines() or [type(error).__name__]
    return ModelError(
        f"there is no directory {name}, and it cannot be fetched from the Hugging Face hub ({reason[0][:200]}); check "
        "the name and the network and run the command again to resume the download, or give a local directory"
    )
