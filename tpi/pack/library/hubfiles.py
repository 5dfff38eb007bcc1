"""Choice of the files of a Hugging Face hub repository that form a model, by the names of the files."""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Any

from tpi.errors import ModelError
from tpi.pack.library.quantisations import House, best_quantisation, quantised_as, size_words, this_machine
from tpi.sources.files import read_json
from tpi.sources.ggufparts import gguf_name, gguf_parts, is_auxiliary
from tpi.sources.safetensors import INDEX, SINGLE

_REPOSITORY = r"(?P<repository>[A-Za-z0-9][\w.-]{0,95}/[\w.-]{1,96})"
_SITE = r"(https?://)?(huggingface\.co|hf\.co)/"
_REVISION, _CHOICE = r"(?P<revision>[\w./-]{1,200})", r"(?P<choice>[\w./+ -]{1,200})"
_SPEC = re.compile(rf"({_SITE})?{_REPOSITORY}(@{_REVISION})?(:{_CHOICE})?", re.ASCII)
# An address copied from a browser. A revision with a slash cannot be told from a directory there.
_AT = rf"(/(tree|blob|resolve)/(?P<revision>[\w.-]{{1,200}})(/{_CHOICE})?)?"
_PAGE = re.compile(rf"{_SITE}{_REPOSITORY}{_AT}/?(\?.*)?", re.ASCII)
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model", "tiktoken.model")
_SMALL = (
    *(
        "config.json",
        "generation_config.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "hf_quant_config.json",
        "quantize_config.json",
    ),
    *_TOKENIZERS,
    *("merges.txt", "vocab.txt", "chat_template.json", "*.jinja", "additional_chat_templates/*.jinja"),
)
_SHOWN = 30  # limit of file names in an error message


@dataclass(frozen=True)
class HubModel:
    """A model of the hub as the user names it: `owner/name`, `owner/name@revision`, `owner/name:Q4_K_M`.

    The prefix `https://huggingface.co/` or `hf.co/` and addresses of the site's pages are accepted. `revision` is a
    branch, a tag or a commit. `choice` is the file name of a GGUF model, or the quantisation in that name.
    """

    repository: str
    revision: str = "main"
    choice: str = ""

    @classmethod
    def parse(cls, spec: str) -> "HubModel | None":
        """Parse `spec`; return None if it does not have one of the forms that this class describes."""
        found = _SPEC.fullmatch(spec)
        if found is None and (page := _PAGE.fullmatch(spec)):
            choice = (page["choice"] or "").rstrip("/")
            names_gguf = choice.endswith(".gguf") or not PurePosixPath(choice).suffix  # else another file of the model
            return cls(page["repository"], page["revision"] or "main", choice if names_gguf else "")
        if found is None or found["repository"].endswith(
            (".gguf", ".safetensors", ".json")
        ):  # the path of a local file that does not exist
            return None
        return cls(found["repository"], found["revision"] or "main", found["choice"] or "")

    @property
    def name(self) -> str:
        """Name of the repository without its owner."""
        return self.repository.rpartition("/")[2]


@dataclass(frozen=True)
class HubFiles:
    """Files of a model in a repository. All paths are relative to the repository, with slashes.

    `names` are all files of the repository. `gguf` are the parts of the chosen GGUF model, empty for a Hugging Face
    directory. `note` says which GGUF model was chosen, and why, if there are several.
    """

    names: frozenset[str]
    gguf: tuple[str, ...] = ()
    note: str = ""

    @classmethod
    def choose(cls, model: HubModel, sizes: Mapping[str, int], house: House = this_machine) -> "HubFiles":
        """Choose the files of `model`.

        Args:
            model: the model that the user named.
            sizes: bytes of each file of the repository; 0 if they are not known.
            house: returns the memory that the model may use. It is called if there are several GGUF models.

        Raises:
            ModelError: if no weights are in a supported format, or `model.choice` does not select one GGUF model.
        """
        known = frozenset(filter(_is_plain, sizes))
        groups = sorted({gguf_parts(Path(name))[0].as_posix() for name in known if _is_gguf(name)})
        if not model.choice and (INDEX in known or SINGLE in known):
            if "config.json" not in known:
                raise ModelError(f"{model.repository} has weights and no config.json; give a complete model")
            return cls(known)
        if not groups:
            raise ModelError(f"{model.repository} has no {_missing(model, known)}")
        first, note = (_named(model, groups), "") if model.choice else _preferred(model, groups, sizes, house)
        parts = tuple(_parts(first))
        if lost := [part for part in parts if part not in known]:
            raise ModelError(f"{model.repository} lacks {lost[0]}, one of the {len(parts)} files of its model")
        return cls(known, parts, note)

    def wanted(self, directory: Path, weights: bool) -> list[str]:
        """Return the files that `directory` must hold.

        The shards of sharded weights are included only once their index is in `directory`. If `weights` is False, the
        weights of a Hugging Face directory are left out.

        Raises:
            ModelError: if the index is damaged, or names files that the repository lacks.
        """
        if self.gguf:
            return list(self.gguf)
        small = sorted(name for name in self.names if any(_matches(name, pattern) for pattern in _SMALL))
        if INDEX not in self.names:
            return [*small, *([SINGLE] if weights else [])]
        if not weights or not (directory / INDEX).exists():
            return [*small, INDEX]
        return [*small, INDEX, *_shards(read_json(directory, INDEX), self.names, directory)]

    @property
    def has_tokenizer(self) -> bool:
        """True if the files include a tokenizer. A GGUF file contains its own."""
        return bool(self.gguf) or not self.names.isdisjoint(_TOKENIZERS)


def _is_plain(name: str) -> bool:
    """Return True if the path stays inside the directory of the repository and can be printed."""
    return (
        name.isprintable()
        and "\\" not in name
        and PurePosixPath(name).parts == tuple(name.split("/"))
        and ".." not in name
    )


def _matches(name: str, pattern: str) -> bool:
    return name.count("/") == pattern.count("/") and fnmatch(name, pattern)


def _is_gguf(name: str) -> bool:
    path = PurePosixPath(name.lower())
    return path.suffix == ".gguf" and not is_auxiliary(path.name)


def _parts(first: str) -> list[str]:
    return [part.as_posix() for part in gguf_parts(Path(first))]


def _named(model: HubModel, files: list[str]) -> str:
    """Return the file that `model.choice` selects.

    Raises:
        ModelError: if `model.choice` selects no file, or several.
    """
    found = [file for file in files if _means(model.choice, file)]
    found = found or [file for file in files if model.choice.lower() in map(str.lower, Path(file).parent.parts)]
    if len(found) == 1:
        return found[0]
    how_many = f"{len(found)} GGUF models" if found else "no GGUF model"
    shown = ", ".join(files[:_SHOWN]) + (", ..." if len(files) > _SHOWN else "")
    raise ModelError(f"{model.repository} has {how_many} {model.choice!r}; name one of its files: {shown}")


def _preferred(model: HubModel, files: list[str], sizes: Mapping[str, int], house: House) -> tuple[str, str]:
    """Return the first file of the GGUF model that suits the memory of the house best, and a note about the choice.

    The note is empty if there is only one model.
    """
    whole = {file: sum(sizes.get(part, 0) for part in _parts(file)) for file in files}
    best, why = best_quantisation(whole, house)
    return best, f"using {best}{size_words(whole[best])}, {why}; another: {model.repository}:FILE" if why else ""


def _means(choice: str, file: str) -> bool:
    """Return True if `choice` is the file's path, name, name without suffix, or the quantisation in its name."""
    path, wanted = Path(file), choice.lower()
    whole = (file, path.name, gguf_name(path), *(part.as_posix() for part in gguf_parts(path)))
    if wanted in {name.lower() for name in whole} or wanted in {part.name.lower() for part in gguf_parts(path)}:
        return True
    return quantised_as(wanted, file)


def _shards(index: Mapping[str, Any], names: Collection[str], directory: Path) -> list[str]:
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ModelError(f"{directory / INDEX} has no weight_map; remove it and download it again")
    shards = sorted(set(weight_map.values()))
    if lost := [shard for shard in shards if shard not in names]:
        raise ModelError(f"{directory / INDEX} names {lost[0][:200]!r}, which the repository does not have")
    return shards


def _missing(model: HubModel, names: Collection[str]) -> str:
    if model.choice:
        return f"GGUF files; leave out :{model.choice}"
    pickled = sorted(name for name in names if name.endswith((".bin", ".pt", ".pth")))
    if pickled:
        return (
            f"weights in safetensors or GGUF, only {pickled[0]}, a pickle, which can run any code when it is opened; "
            "look for a converted copy of the model"
        )
    return f"{SINGLE}, {INDEX} or GGUF files; give a model in one of these formats"
