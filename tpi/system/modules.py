"""Commands that run a Python module in a process of its own."""

import sys

_RUN = (
    "import sys; sys.path[:] = filter(None, sys.path); import runpy; del sys.argv[0]; "
    "runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)"
)


def module_command(module: str, *arguments: str) -> tuple[str, ...]:
    """Return the command that runs `module` as `python -m` does, but imports nothing from the working directory.

    `python -m` searches the working directory first: in a folder with a file json.py, a child process would run that
    file.
    """
    return (sys.executable, "-c", _RUN, module, *arguments)
