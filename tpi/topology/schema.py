"""Parser of topology files: YAML, read strictly.

Errors name the file, the line and the field. Schema: docs/testbed.md.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import yaml

from tpi.config import parse_size
from tpi.errors import UsageError
from tpi.paths import user_path
from tpi.topology.topology import UNLIMITED, Host, HostLink, Router, Topology
from tpi.topology.units import parse_disk, parse_percent, parse_rate, parse_time

T = TypeVar("T")
_NODE_NAME = 15  # characters; the longest name that the kernel allows for a network interface


class Section:
    """One YAML mapping being read: `take` each known field, then call `finish` to refuse all others."""

    def __init__(self, node: yaml.Node, file: str, where: str) -> None:
        self.file, self.where, self.line = file, where, node.start_mark.line + 1
        self._fields: dict[str, yaml.Node] = {}
        self._known: list[str] = []
        if _empty(node):
            return
        if not isinstance(node, yaml.MappingNode):
            raise self.error(node, f"{where} must be a mapping of fields to values")
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise self.error(key, f"{where} has a field whose name is not plain text")
            if key.value in self._fields:
                raise self.error(key, f"{where} has the field {key.value!r} twice")
            self._fields[str(key.value)] = value

    def error(self, node: yaml.Node | None, sentence: str) -> UsageError:
        """Return the exception to raise about `node`, or if it is None about the whole section.

        The message is the file, the line and `sentence`.
        """
        line = self.line if node is None else node.start_mark.line + 1
        return UsageError(f"{self.file}, line {line}: {sentence}")

    def names(self) -> list[str]:
        """Return the names of the fields in file order, for sections whose names the user chooses."""
        return list(self._fields)

    def node(self, name: str) -> yaml.Node | None:
        """Return the unparsed value of the field `name`, or None if the section does not have it."""
        self._known.append(name)
        return self._fields.get(name)

    def take(self, name: str, parse: Callable[[str], T]) -> T | None:
        """Return the value of the field `name`, parsed by `parse`, or None if the section does not have it."""
        node = self.node(name)
        if node is None:
            return None
        if not isinstance(node, yaml.ScalarNode):
            raise self.error(node, f"{self.where}: {name!r} must be a single value")
        try:
            return parse(node.value)
        except (ValueError, UsageError) as error:
            raise self.error(node, f"{self.where}: {name!r}: {error}") from error

    def finish(self) -> None:
        """Raise UsageError for the first field that was neither taken nor looked up."""
        for name, node in self._fields.items():
            if name not in self._known:
                raise self.error(node, f"{self.where} has no field {name!r}; it has {', '.join(self._known)}")


def shipped() -> dict[str, Path]:
    """Return the names and files of the topologies that come with TPI."""
    folder = Path(__file__).parent / "shipped"
    return {file.stem: file for file in sorted(folder.glob("*.yaml"))}


def load_topology(file: str) -> Topology:
    """Read the topology at a path, or the shipped one with that name.

    Raises:
        UsageError: if there is no such file, or it does not follow the schema. The message names line and field.
    """
    path = user_path(file)
    if not path.is_file():
        if file not in shipped():
            raise UsageError(
                f"{file} is neither a file nor a shipped topology; give a file or one of {', '.join(shipped())}"
            )
        path = shipped()[file]
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{file} is not UTF-8 text (byte {error.start}); give a YAML file") from error
    return parse_topology(text, str(file), path.stem)


def parse_topology(text: str, file: str, name: str) -> Topology:
    """Return the topology that `text` describes.

    `file` is the name used in errors, `name` the topology's name if `text` gives none.

    Raises:
        UsageError: if `text` does not follow the schema.
    """
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = mark.line + 1 if mark else 1
        raise UsageError(f"{file}, line {line}: not YAML: {getattr(error, 'problem', None) or error}") from error
    if root is None:
        raise UsageError(f"{file} is empty; a topology needs devices, and links between them")
    top = Section(root, file, "the topology")
    about, name = top.take("about", str) or "", top.take("name", str) or name
    defaults = _subsection(top, "defaults")
    device_defaults = _device(_subsection(defaults, "device"), "", Host(""))
    link_defaults = _link(_subsection(defaults, "link"), ("", ""), HostLink(("", "")))
    devices, routers = _subsection(top, "devices"), _subsection(top, "routers")
    device_list = tuple(_device(_named(devices, key), key, device_defaults) for key in devices.names())
    router_list = tuple(_router(_named(routers, key), key) for key in routers.names())
    link_list = _links(top, link_defaults, {*devices.names(), *routers.names()})
    defaults.finish()
    top.finish()
    if not device_list:
        raise top.error(None, "the topology needs 'devices', a mapping of names to settings")
    try:
        return Topology(name, device_list, link_list, router_list, about)
    except UsageError as error:
        raise UsageError(f"{file}: {error}") from error


def _empty(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode) and node.value in ("", "null", "~")


def _subsection(parent: Section, name: str) -> Section:
    node = parent.node(name)
    return Section(node or yaml.ScalarNode("", "", _START, _START), parent.file, repr(name))


_START = yaml.Mark("", 0, 0, 0, "", 0)


def _named(parent: Section, name: str) -> Section:
    """Return the section of the device or router `name`. Refuse a name that is not valid."""
    node = parent.node(name)
    assert node is not None  # the name came from the section's own keys
    if len(name) > _NODE_NAME or not name.replace("-", "").replace("_", "").isalnum():
        raise parent.error(node, f"{name!r} is not a valid name; use at most {_NODE_NAME} letters, digits, - and _")
    return Section(node, parent.file, repr(name))


def _device(section: Section, name: str, default: Host) -> Host:
    cpu, memory = section.take("cpu", _cores), section.take("memory", parse_size)
    disk = section.take("disk", parse_disk)
    section.finish()
    return Host(
        name,
        default.cpu if cpu is None else cpu,
        default.memory if memory is None else memory,
        default.disk if disk is None else disk,
    )


def _router(section: Section, name: str) -> Router:
    shared = section.take("shared", parse_rate)
    section.finish()
    return Router(name, shared)


def _links(top: Section, default: HostLink, names: set[str]) -> tuple[HostLink, ...]:
    node = top.node("links")
    if node is None or _empty(node):
        return ()
    if not isinstance(node, yaml.SequenceNode):
        raise top.error(node, "'links' must be a list")
    links = []
    for number, item in enumerate(node.value, 1):
        section = Section(item, top.file, f"link {number}")
        link = _link(section, _ends(section, names), default)
        if link.jitter > link.latency:
            raise section.error(
                item, f"{section.where}: 'jitter' exceeds 'latency': packets would arrive before they are sent"
            )
        links.append(link)
    return tuple(links)


def _ends(section: Section, names: set[str]) -> tuple[str, str]:
    node = section.node("between")
    if not isinstance(node, yaml.SequenceNode) or len(node.value) != 2:
        raise section.error(node, f"{section.where} needs 'between', a list of the two ends")
    for end in node.value:
        if end.value not in names:
            raise section.error(
                end, f"{section.where} ends at {end.value!r}, which is not a device or router of this file"
            )
    first, second = (str(end.value) for end in node.value)
    if first == second:
        raise section.error(node, f"{section.where} leads from {first!r} to itself")
    return first, second


def _link(section: Section, ends: tuple[str, str], default: HostLink) -> HostLink:
    bandwidth, latency = section.take("bandwidth", _bandwidth), section.take("latency", parse_time)
    jitter, loss = section.take("jitter", parse_time), section.take("loss", parse_percent)
    queue = section.take("queue", parse_time)
    section.finish()
    return HostLink(
        ends,
        default.bandwidth if bandwidth is None else bandwidth,
        default.latency if latency is None else latency,
        default.jitter if jitter is None else jitter,
        default.loss if loss is None else loss,
        default.queue if queue is None else queue,
    )


def _bandwidth(text: str) -> float:
    rate = UNLIMITED if text == "unlimited" else parse_rate(text)
    if rate == 0:
        raise ValueError("a link of rate 0 carries nothing; leave it out, or use `tpi testbed fault cut`")
    return rate


def _cores(text: str) -> float:
    cores = float(text)
    if not 0.01 <= cores <= 4096:
        raise ValueError(f"{text} is not a number of cores between 0.01 and 4096")
    return cores
