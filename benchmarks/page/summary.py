"""Summary of the page: the kept and the broken promises."""

from collections.abc import Sequence

from benchmarks.page.markdown import cell, table
from benchmarks.result import Check, Result, Row

KNOWN = (
    "A budget of 90% of the model on a second server (EPYC, two cores, AVX2) reached 0.82 and 0.78 of the possible "
    "speed in two runs (promised: 0.9). On that server reading takes as long as computing, and each slows the other. "
    "No result file has these runs.",
)
"""Known broken promises that no result file has."""


def summary(sections: Sequence[tuple[Result, str]]) -> str:
    """Render the summary of all sections.

    Each section is a result with its `benchmarks.page.document.Section.age`.
    """
    lines = ["## Promises and results", "", _counted(sections), "", *table(_rows(sections)), ""]
    broken = [(result.title, check) for result, _ in sections for check in result.checks if not check.kept]
    lines += ["**Not kept**", "", *(_line(title, check) for title, check in broken)]
    lines += [f"- {words}" for words in KNOWN]
    return "\n".join([*lines, ""])


def _counted(sections: Sequence[tuple[Result, str]]) -> str:
    checks = [check for result, _ in sections for check in result.checks]
    kept, old = sum(check.kept for check in checks), sum(bool(age) for _, age in sections)
    return (
        f"{kept} of {len(checks)} promises are kept. {old} of {len(sections)} sections were measured with older or "
        "unknown code. Their figures remain until the benchmark runs again."
    )


def _rows(sections: Sequence[tuple[Result, str]]) -> list[Row]:
    return [
        {
            "section": f"[{result.title}](#{_anchor(result.title)})",
            "promises": len(result.checks),
            "kept": sum(check.kept for check in result.checks),
            "closest to its bound": _closest(result.checks),
            "of the present code": "no" if age else "yes",
        }
        for result, age in sections
    ]


def _closest(checks: Sequence[Check]) -> str:
    """Describe the check that is closest to its bound, as a share of the bound. A broken check is always closest."""
    if not checks:
        return "no promise"
    least = min(checks, key=_room)
    return f"{least.claim}: {cell(least.value)}, {least.limit} {cell(least.bound)}"


def _room(check: Check) -> float:
    """Return the distance of the value from its bound, as a share of the bound; negative if the promise is broken."""
    if check.within is not None:
        return (check.within - abs(check.value - check.bound)) / (check.within or 1.0)
    room = check.bound - check.value if check.at_most else check.value - check.bound
    return room / (abs(check.bound) or 1.0)


def _line(title: str, check: Check) -> str:
    return f"- {title}: {check.claim} is {cell(check.value)}, promised {check.limit} {cell(check.bound)}."


def _anchor(title: str) -> str:
    """Return the anchor that GitHub gives a heading."""
    return "".join(c for c in title.lower().replace(" ", "-") if c.isalnum() or c == "-")
