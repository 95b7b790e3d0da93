"""Lists what users may rely on: public names with their signatures, flags of commands, settings. This module writes docs/public_names.txt.

    python scripts/public_names.py > docs/public_names.txt

Public are the names of `zerojax`, those that a page or an example imports from its modules or names in backticks with their module, and
what these classes offer. A test compares the file with the code, so a change of what users rely on is seen in its own lines.
"""

import ast
import functools
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).resolve().parents[1]
COMMANDS = re.compile(r'^ +([\w-]+)\\ -\*\) known="(.*)" ;;$', re.MULTILINE)
SHOWN_METHODS = ("__init__", "__call__", "__enter__", "__iter__", "__len__", "__getitem__")


def text() -> str:
    """Returns the whole file."""
    names = {f"zerojax.{name}": f"{module}.{name}" for name, module in _modules_of_names().items()}
    names |= {name: name for name in documented() if name not in names.values()}
    parts = [
        [line for name, place in sorted(names.items()) for line in of_name(name, place)],
        sorted(flags()),
        settings(),
    ]
    return "\n\n".join("\n".join(part) for part in parts) + "\n"


def documented() -> set[str]:
    """Returns the dotted names in modules of zerojax that pages and examples mention: imported in code, or in backticks."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    found = set()
    for page in pages:
        written = page.read_text()
        found |= set(re.findall(r"`(zerojax(?:\.\w+){2,})", written))
        code = "\n".join(re.findall(r"^```python\n(.*?)^```$", written, re.MULTILINE | re.DOTALL))
        found |= _imported(ast.parse(code))
    for path in sorted((ROOT / "examples").glob("*.py")):
        found |= _imported(ast.parse(path.read_text()))
    return {name for name in found if not isinstance(_node(name), ast.Module | None)}


def of_name(name: str, place: str) -> list[str]:
    """Returns the lines of a public name that is defined at `place`: of a function one, of a class or a module one for each thing in it."""
    node = _node(place)
    if isinstance(node, ast.FunctionDef):
        return [f"{name}{_signature(node)}"]
    if isinstance(node, ast.ClassDef):
        bases = ", ".join(map(ast.unparse, node.bases))
        return [f"class {name}({bases})", *_members(name, node)]
    if isinstance(node, ast.Module):
        return [
            line
            for one in node.body
            if isinstance(one, ast.FunctionDef | ast.ClassDef) and not one.name.startswith("_")
            for line in of_name(f"{name}.{one.name}", f"{place}.{one.name}")
        ]
    return [f"{name} = {ast.unparse(node.value)}"] if isinstance(node, ast.Assign) else [name]


def flags() -> Iterator[str]:
    """Yields a line for each command, with its flags."""
    command = [sys.executable, "-m", "zerojax.commands.completion", "bash"]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name, known in COMMANDS.findall(said):
        yield " ".join([f"zerojax {name}", *sorted(known.split())])


def settings() -> list[str]:
    """Returns a line for each setting of a run, with its default."""
    from zerojax.trainer import settings as settings_lib

    return [
        f"config.{place}: {type(one.default).__name__} = {one.default!r}"
        for place, one in settings_lib.table().items()
        if one.default is not None
    ]


def _members(name: str, node: ast.ClassDef) -> Iterator[str]:
    for one in node.body:
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name) and not one.target.id.startswith("_"):
            default = f" = {ast.unparse(one.value)}" if one.value else ""
            yield f"{name}.{one.target.id}: {ast.unparse(one.annotation)}{default}"
        if isinstance(one, ast.FunctionDef) and (not one.name.startswith("_") or one.name in SHOWN_METHODS):
            decorators = {ast.unparse(decorator) for decorator in one.decorator_list}
            is_value = decorators & {"property", "functools.cached_property"}
            returns = f" -> {ast.unparse(one.returns)}" if one.returns else ""
            yield f"{name}.{one.name}{returns if is_value else _signature(one)}"


def _signature(node: ast.FunctionDef) -> str:
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"({ast.unparse(node.args)}){returns}"


def _imported(program: ast.Module) -> set[str]:
    """Returns the names of zerojax's modules that a program imports, and those that it reads from imported modules."""
    found, modules = set(), {}
    for node in ast.walk(program):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "zerojax":
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                modules[alias.asname or alias.name] = whole
                found |= {whole} if _file(whole) is None else set()
    for node in ast.walk(program):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            found.add(f"{modules[node.value.id]}.{node.attr}")
    return found


def _modules_of_names() -> dict[str, str]:
    """Returns {public name: its module}, from zerojax/__init__.py."""
    body = _tree(ROOT / "zerojax" / "__init__.py").body
    return next(ast.literal_eval(node.value) for node in body if isinstance(node, ast.Assign))


def _node(name: str) -> ast.stmt | ast.Module | None:
    """Returns the definition of a dotted name: a module, or a function, class or value of one. None: it is neither."""
    if file := _file(name):
        return _tree(file) if file.name != "__init__.py" else None
    above, _, last = name.rpartition(".")
    if not above:
        return None
    outer = _tree(file) if (file := _file(above)) else _node(above)
    for one in getattr(outer, "body", ()):
        targets = one.targets if isinstance(one, ast.Assign) else [getattr(one, "target", None)]
        if getattr(one, "name", None) == last or any(getattr(target, "id", None) == last for target in targets):
            return one
    return None


def _file(name: str) -> pathlib.Path | None:
    """Returns the file of a module."""
    place = ROOT.joinpath(*name.split("."))
    return next((path for path in (place.with_suffix(".py"), place / "__init__.py") if path.is_file()), None)


@functools.cache
def _tree(path: pathlib.Path) -> ast.Module:
    return ast.parse(path.read_text())


if __name__ == "__main__":
    print(text(), end="")
