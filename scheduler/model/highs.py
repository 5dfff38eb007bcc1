"""Mixed integer linear programs, solved by HiGHS as scipy has it."""

from typing import Any

from tpi.system.hidden import stdout_hidden


def solve_milp(objective: Any, **options: Any) -> Any:
    """What `scipy.optimize.milp` finds, to whom arguments go as they are.

    Some versions of HiGHS print a line that their authors left in, whatever they are told to print.
    """
    from scipy.optimize import milp

    with stdout_hidden():
        return milp(objective, **options)
