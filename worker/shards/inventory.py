"""The entries of a cache (models, packs, shards), and their removal to stay within its limit."""

from collections.abc import Iterator
from pathlib import Path

from tpi.cachelimit import CacheLimit
from tpi.pack.library.inventory import Entry, remove_stored, stored_models, stored_packs
from tpi.pack.library.store import remove_partial
from worker.shards.stored import StoredImage, stored_images
from worker.shards.uses import change_lock, keys_in_use


def entries(cache: Path) -> list[Entry]:
    """Return the models, packs and shards below the directory `cache`; each entry can be removed by itself."""
    return [*stored_models(cache), *stored_packs(cache), *_shards(cache)]


def discard(entry: Entry) -> bool:
    """Remove the files of an entry that no process uses; return False if some files stay because a process uses them.

    Raises:
        OSError: if the disk cannot be written.
    """
    if entry.kind != "shards":
        return remove_stored(entry)
    names = _pack_names(_cache_of(entry.path))
    with change_lock(entry.path):
        used = keys_in_use(entry.path)
        images = [image for image in stored_images(entry.path) if _name(image, names) == entry.name]
        for image in images:
            if image.key not in used:
                image.remove()
    return not any(image.key in used for image in images)


def keep_within(cache: Path, limit: CacheLimit, needed: int = 0) -> list[Entry]:
    """Remove unused packs and shards until `needed` more bytes fit within `limit`; return what was removed.

    The least recently used go first. Pulled models stay, since they would have to be downloaded again. Packs whose
    source is gone stay too.

    Raises:
        OSError: if the disk cannot be written.
    """
    for directory in (cache / "packs", cache / "models"):
        remove_partial(directory)
    found = entries(cache)
    excess = limit.excess(cache, sum(entry.nbytes for entry in found), needed) if cache.is_dir() else 0
    spare = [entry for entry in found if entry.reproducible and not entry.in_use and entry.kind != "model"]
    gone = []
    for entry in sorted(spare, key=lambda entry: (entry.last_used, entry.kind == "pack")):
        if excess <= 0:
            break
        if discard(entry):
            excess -= entry.nbytes
            gone.append(entry)
    return gone


def _shards(cache: Path) -> Iterator[Entry]:
    """Yield the shards of each model in the master's cache, and in the caches of the workers that `--local` starts."""
    names = _pack_names(cache)
    for root in (cache / "shards", *sorted((cache / "local").glob("*/shards"))):
        groups: dict[str, list[StoredImage]] = {}
        for image in stored_images(root):
            groups.setdefault(_name(image, names), []).append(image)
        used = keys_in_use(root)
        for name, images in groups.items():
            nbytes, last = sum(image.nbytes for image in images), max(image.last_used for image in images)
            yield Entry("shards", name, root, nbytes, last, True, any(image.key in used for image in images))


def _pack_names(cache: Path) -> dict[str, str]:
    """Return the name of the pack that has each block, by the block's id.

    A shard image has only the id of its block, so its model is found by this name.
    """
    packs = cache / "packs"  # a pack may contain renumbered packs
    found = (path for form in ("[!.]*", "[!.]*/[!.]*") for path in packs.glob(f"{form}/*.safetensors"))
    return {path.stem: path.relative_to(packs).parts[0] for path in found}


def _cache_of(root: Path) -> Path:
    return root.parent.parent.parent if root.parent.parent.name == "local" else root.parent


def _name(image: StoredImage, names: dict[str, str]) -> str:
    return names.get(image.path.parent.name) or image.model or "unknown"
