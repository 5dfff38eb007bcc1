"""The shard cache: which images a node has on disk, and how it gets the ones it lacks. Workers and the master use it.

    <root>/<block id>/<ranges>.shard        complete, checked when written; never changed, only removed
    <root>/<block id>/<ranges>.part         being filled; what it holds is found by its hashes, without a journal
    <root>/checked.json                     size, times and content of images that were checked before

Several processes may share a root. One of them keeps its drafts for resuming; the others use private names.
"""

import contextlib
import fcntl
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tpi.errors import WeightsError
from tpi.progress import Progress, silent
from worker.draft import Draft, bad_pieces, out_of_disk
from worker.image import HeldBlock, ImagePlan, Piece, stored_units

_KEEP_OTHERS = 1  # images of a block with other ranges that stay, so that going back to the last split sends nothing


class ShardCache:
    """The images below one directory."""

    def __init__(self, root: Path) -> None:
        """Open or create the cache.

        Raises:
            WeightsError: if the directory cannot be made.
        """
        self.root = root
        try:
            root.mkdir(parents=True, exist_ok=True)
            self._users = os.open(root / "users.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            self._writer = os.open(root / "writer.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise WeightsError(f"cannot use {root} as a cache: {error.strerror}; give another with --cache") from error
        fcntl.flock(self._users, fcntl.LOCK_SH)
        self._suffix = ".part" if _try_lock(self._writer) else f".{os.getpid()}.part"
        if self._suffix == ".part" and self._alone():
            for stray in root.glob("*/*.*.part"):
                if stray.name.removesuffix(".part").rpartition(".")[2].isdecimal():
                    stray.unlink(missing_ok=True)
        self._checked = _load(root / "checked.json")

    def open(self, plans: Sequence[ImagePlan], progress: Progress = silent) -> dict[str, HeldBlock | Draft]:
        """Every block of `plans` by id: complete, or a draft that holds what this node could find on its own disk.

        Raises:
            WeightsError: if the missing images do not fit on the disk.
        """
        found: dict[str, HeldBlock | Draft] = {}
        total = len(plans)
        self._require_space([plan for plan in plans if not self._path(plan).exists()])
        for done, plan in enumerate(plans):
            progress(done, total)
            if plan.id not in found:
                found[plan.id] = self._complete(plan) or self._draft(plan)
        self._save()
        return found

    def finish(self, draft: Draft) -> HeldBlock:
        """Make a draft that lacks nothing an image, durably, and forget images that it supersedes.

        Raises:
            WeightsError: if the disk is full or failing.
        """
        path = self._path(draft.plan)
        draft.publish(path)
        self._remember(draft.plan, path)
        return draft.plan.held(path)

    def sound(self, path: Path, pieces: Sequence[Piece], token: str) -> bool:
        """Whether the pieces of a file elsewhere match their hashes; remembered while the file is unchanged."""
        key, stamp = f"{path.absolute()}#{token}", _stamp(path, token)
        if stamp is None or self._checked.get(key) == stamp:
            return stamp is not None
        if bad_pieces(path, pieces):
            return False
        self._checked[key] = stamp
        return True

    def prune(self, plans: Iterable[ImagePlan]) -> None:
        """Remove images of these blocks with other ranges, but the latest; does nothing if somebody else reads here."""
        for plan in plans if self._alone() else ():
            others = [path for path in self._siblings(plan) if path != self._path(plan)]
            for path in sorted(others, key=lambda path: path.stat().st_mtime_ns)[: -_KEEP_OTHERS or None]:
                path.unlink(missing_ok=True)
                self._checked.pop(self._key(path), None)
        self._save()

    def close(self) -> None:
        """Write down what was checked, and release the locks."""
        self._save()
        os.close(self._users)
        os.close(self._writer)

    def _complete(self, plan: ImagePlan) -> HeldBlock | None:
        """The image of `plan` if it exists and is sound. One that is damaged becomes a draft again."""
        path = self._path(plan)
        stamp = _stamp(path, plan.token)
        if stamp is None:
            return None
        if self._checked.get(self._key(path)) != stamp:
            if bad_pieces(path, plan.pieces) or path.stat().st_size != plan.file_bytes:
                path.rename(self._draft_path(plan))
                return None
            self._remember(plan, path)
        return plan.held(path)

    def _draft(self, plan: ImagePlan) -> Draft:
        path = self._draft_path(plan)
        path.parent.mkdir(exist_ok=True)
        draft = Draft(plan, path)
        for sibling in self._siblings(plan):
            if not draft.missing:
                break
            draft.copy_from(sibling, stored_units(sibling))
        return draft

    def _siblings(self, plan: ImagePlan) -> Iterator[Path]:
        return (self.root / plan.id).glob("*.shard")

    def _path(self, plan: ImagePlan) -> Path:
        return self.root / plan.id / plan.name

    def _draft_path(self, plan: ImagePlan) -> Path:
        return self._path(plan).with_suffix(self._suffix)

    def _key(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix()

    def _remember(self, plan: ImagePlan, path: Path) -> None:
        stamp = _stamp(path, plan.token)
        if stamp is not None:
            self._checked[self._key(path)] = stamp

    def _alone(self) -> bool:
        alone = _try_lock(self._users)
        fcntl.flock(self._users, fcntl.LOCK_SH)
        return alone

    def _require_space(self, plans: Sequence[ImagePlan]) -> None:
        needed = sum({plan.id: plan.file_bytes for plan in plans}.values())
        started = sum(_allocated(self._draft_path(plan)) for plan in plans)
        disk = os.statvfs(self.root)
        free = disk.f_bavail * disk.f_frsize + started
        if needed > free:
            raise out_of_disk(self.root, needed, free)

    def _save(self) -> None:
        draft = self.root / f"checked.{os.getpid()}.tmp"
        with contextlib.suppress(OSError):  # what is not remembered is checked again
            draft.write_text(json.dumps(self._checked))
            draft.replace(self.root / "checked.json")


def _stamp(path: Path, token: str) -> list[int | str] | None:
    """What changes when the file or what it should hold changes; None if there is no file."""
    try:
        found = path.stat()
    except OSError:
        return None
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino, token]


def _allocated(path: Path) -> int:
    try:
        return path.stat().st_blocks * 512
    except OSError:
        return 0


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _load(path: Path) -> dict[str, list[int | str]]:
    try:
        known = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}
