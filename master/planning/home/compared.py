"""The layouts that were compared, with the seconds of a token by part, for tables and for `--json`."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from master.planning.home.dealing import HomeModel
from scheduler.model.home.layouts import layouts, pure_layouts
from scheduler.model.home.problem import Members
from scheduler.model.home.stages import Layout
from tpi.text import short_number

_BEST, _MS = 3, 1e3
_NAMED = 3  # limit of stages that are described one by one; for more, the text gives only their number
_ACCEPTANCES = (0.5, 0.8)
PARTS = ("computing", "sums", "hops", "disks")


@dataclass(frozen=True)
class ComparedLayouts:
    """The layout to use, the best ones, and the two pure forms over all nodes.

    Attributes:
        names: the nodes' names by rank.
        use: the layout to use.
        best: the fastest layouts of different numbers of stages over all or some nodes, at most three.
        one: one stage of all nodes; None if that does not fit.
        singles: stages of one node each; None if that does not fit.
        streams: the number of answers at once for which the layout was chosen.
        drafting: seconds in which the layer for multi-token prediction drafts a token; 0 without such a layer.
    """

    names: Sequence[str]
    use: Layout
    best: tuple[Layout, ...]
    one: Layout | None
    singles: Layout | None
    streams: int = 1
    drafting: float = 0.0

    @property
    def columns(self) -> tuple[str, ...]:
        """The titles of the columns of `rows`."""
        return (
            "layout (ms a token)",
            "all",
            *PARTS,
            f"{self.streams} at once" if self.streams > 1 else "drafts 50/80%",
        )

    @classmethod
    def of(cls, model: HomeModel, use: Layout, drafting: float = 0.0) -> "ComparedLayouts":
        """Compare the layout `use` with the best ones and the pure forms; to draft a token takes `drafting` seconds."""
        one, singles = pure_layouts(model.staged)
        best = tuple(layouts(model.staged, streams=model.streams)[:_BEST])
        return cls(model.home.names, use, best, one, singles, model.streams, drafting)

    def rows(self) -> Iterator[tuple[str, ...]]:
        """Yield a row of cells for each layout, in milliseconds.

        The last cell is the time of a token if several answers are computed at once, which drafts do not make faster.
        For one answer it says how many times as fast drafts make it.
        """
        told = [self.use, *self.best, *(each for each in (self.one, self.singles) if each is not None)]
        shown: list[Members | tuple[object, ...]] = []
        for layout in told:
            what = tuple((stage.first, stage.last, stage.split.members) for stage in layout.stages)
            if what in shown:
                continue
            shown.append(what)
            figures = (layout.seconds, *seconds_by_part(layout).values())
            last = "/".join(f"{layout.drafted(acceptance, self.drafting):.1f}x" for acceptance in _ACCEPTANCES)
            if self.streams > 1:
                last = short_number(_MS * layout.streams(self.streams))
            used = "-> " if layout == self.use else ""
            yield used + self.words(layout), *(short_number(_MS * seconds) for seconds in figures), last

    def words(self, layout: Layout) -> str:
        """Return the stages of a layout in words."""
        return layout_words(layout, self.names)

    def fields(self) -> dict[str, Any]:
        """Return the fields of the table for `--json`. Times are in seconds."""
        return {
            "used": self._fields(self.use),
            "best": [self._fields(layout) for layout in self.best],
            "one_stage": self._fields(self.one),
            "one_node_a_stage": self._fields(self.singles),
        }

    def _fields(self, layout: Layout | None) -> dict[str, Any] | None:
        if layout is None:
            return None
        stages = [
            {"layers": [stage.first, stage.last], "nodes": [self.names[rank] for rank in stage.split.members]}
            for stage in layout.stages
        ]
        faster = {str(acceptance): layout.drafted(acceptance, self.drafting) for acceptance in _ACCEPTANCES}
        return {
            "stages": stages,
            "seconds": layout.seconds,
            "seconds_at_once": layout.streams(self.streams),
            "parts": seconds_by_part(layout),
            "times_as_fast_with_drafts": faster,
        }


def layout_words(layout: Layout, names: Sequence[str]) -> str:
    """Return the stages of a layout in words: layers and nodes; if there are many, the number of stages and nodes.

    `names` are the names of all nodes by rank.
    """
    stages = [stage.split.members for stage in layout.stages]
    if len(stages) == 1:
        return _group(stages[0], names)
    if layout.ring:
        return f"{len(stages)} stages of {len(layout.members)} nodes in turn"
    if len(stages) > _NAMED:
        sizes = sorted({len(members) for members in stages})
        each = f"{sizes[0]}" if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
        return f"{len(stages)} stages of {each} node{'s' * (sizes[-1] > 1)}"
    parts = ((stage.first, stage.last - 1, _group(stage.split.members, names)) for stage in layout.stages)
    return ", ".join(f"{first}-{last}: {group}" for first, last, group in parts)


def _group(members: Members, names: Sequence[str]) -> str:
    if len(members) > _NAMED:
        return f"all {len(members)}" if len(members) == len(names) else f"{len(members)} nodes"
    return "+".join(names[rank] for rank in members)


def seconds_by_part(layout: Layout) -> dict[str, float]:
    """Return the seconds of a token, by the resource that they are spent on."""
    return dict(zip(PARTS, (layout.compute, layout.exchange, layout.hops, layout.disk), strict=True))
