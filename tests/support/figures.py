"""The figures of docs/faults.md: seconds between two events, measured until within limits or missed too often.

A busy machine delays both events, and never hastens one. So the least of several measurements counts, less the longest
time for which the host stood still during the measurement.
"""

from collections.abc import Callable, Mapping

from tests.support.stillness import Stillness

_TRIES = 5


def assert_figures(row: str, limits: Mapping[str, float], once: Callable[[int], Mapping[str, float]]) -> None:
    """Call `once`, which injects the fault and returns seconds by the names of `limits`, until all are within limits.

    `once` gets the number of the try, and must leave everything ready for the next try. The figures are printed.
    """
    least = dict[str, float]()
    for number in range(_TRIES):
        with Stillness() as host:
            found = once(number)
        excused = host.longest if host.excuses else 0.0
        least = {name: min(found[name] - excused, least.get(name, found[name])) for name in limits}
        if all(least[name] < limit for name, limit in limits.items()):
            break
    for name, limit in limits.items():
        print(f"{row}: {name} in {least[name]:.3f} s of {limit:g} s")  # noqa: T201 - for `pytest -s`
    assert {name: least[name] for name in limits if least[name] >= limits[name]} == {}
