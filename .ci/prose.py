"""Check the wording of docstrings, comments, messages and pages against the rules of plain English.

    python .ci/prose.py [PATH ...]

Print each offence as `file:line: rule: text` and exit with status 1 if there is one. The rules:

- verb: the docstring of a function or method begins with an imperative verb (`.ci/verbs.txt`).
- noun: the docstring of a module, class or property does not begin with a fragment such as "Of" or "That".
- person: code is not a person. "who", "nobody" and the like stand in no docstring, comment, message or page.
- name: a test is not called after a person either.

Tests may begin their docstrings as they like. Tests and benchmarks may send any text. Without paths, everything is
checked.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
SHIPPED = ("tpi", "allreduce", "scheduler", "worker", "master", "testbed")
PACKAGES = (*SHIPPED, "benchmarks", "tests")
VERBS = frozenset((ROOT / ".ci/verbs.txt").read_text().split())
FRAGMENTS = frozenset(
    re.findall(
        r"\w+",
        "also and as both for from if it of see so that there these they this those what when where whether which who "
        "whom whose with",
    )
)
PERSON = re.compile(
    r"\b(who|whom|whoever|nobody|somebody|everybody|anybody|someone|everyone|anyone|no one)\b", re.IGNORECASE
)
_PERSON_NAME = re.compile(r"_(who|whom|whoever|nobody|somebody|everybody|anybody|someone|everyone|anyone)(_|$)")
_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)

Offence = tuple[int, str, str]


def main(arguments: list[str]) -> int:
    """Check the paths of the command line, or all that ships; return the exit status."""
    wanted = [Path(each).resolve() for each in arguments] or [ROOT]
    found = 0
    for path in sorted({file for each in wanted for file in _files(each)}):
        text = path.read_text()
        relative = path.relative_to(ROOT)
        offences = _page(text) if path.suffix == ".md" else _module(text, relative.parts[0])
        for line, rule, said in sorted(offences):
            print(f"{relative}:{line}: {rule}: {' '.join(said.split())[:100]}")
            found += 1
    print(f"{found} offences" if found else "Plain English: no offences")
    return bool(found)


def _files(path: Path) -> Iterator[Path]:
    """Yield the Python files and pages that `path` is or contains."""
    if path.is_file():
        yield path
    elif path == ROOT:
        yield from ROOT.glob("*.md")
        for name in (*PACKAGES, "docs"):
            yield from _files(ROOT / name)
    else:
        yield from path.rglob("*.py")
        yield from path.rglob("*.md")


def _page(text: str) -> Iterator[Offence]:
    """Yield the offences of a page in Markdown, outside of code."""
    prose = _FENCE.sub(lambda code: "\n" * code[0].count("\n"), text)
    for number, line in enumerate(prose.splitlines(), 1):
        if PERSON.search(re.sub(r"`[^`]*`", "", line)):
            yield number, "person", line.strip()


def _module(text: str, package: str) -> Iterator[Offence]:
    """Yield the offences of a Python file."""
    tree, tests = ast.parse(text), package == "tests"
    docstrings = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if tests and isinstance(node, ast.FunctionDef) and _PERSON_NAME.search(node.name):
            yield node.lineno, "name", node.name
        said = ast.get_docstring(node)
        if not said:
            continue
        constant = node.body[0].value  # type: ignore[attr-defined]
        docstrings.add(constant)
        if PERSON.search(said):
            yield constant.lineno, "person", said
        if not tests:
            yield from _beginning(node, said, constant.lineno)
    yield from _comments(text)
    if package in SHIPPED:  # tests and benchmarks send texts to models
        for node in ast.walk(tree):
            if not isinstance(node, ast.Constant) or not isinstance(node.value, str) or node in docstrings:
                continue
            if " " in node.value and PERSON.search(node.value):
                yield node.lineno, "person", node.value.strip()


def _beginning(node: ast.AST, said: str, line: int) -> Iterator[Offence]:
    """Yield what is wrong with the first word of a docstring."""
    first = re.split(r"[\s,.;:]", said, maxsplit=1)[0]
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not _is_property(node):
        if first.lower() not in VERBS or not first[:1].isupper():
            yield line, "verb", said
    elif first.lower() in FRAGMENTS:
        yield line, "noun", said


def _is_property(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return True if the function is read as an attribute."""
    return any("property" in ast.unparse(each) for each in node.decorator_list)


def _comments(text: str) -> Iterator[Offence]:
    """Yield the comments that speak of code as of a person."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and PERSON.search(token.string):
            yield token.start[0], "person", token.string


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
