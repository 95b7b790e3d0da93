"""The configs that travel with the package, by name: `--config zero3`, or `from zerojax.configs import zero3` in a program.

In a checkout they are the files of configs/ at its top. An installed package holds a copy of that folder here (pyproject.toml says so).
To add one, add a file there. A config of your own starts from `base` in the same way, in any folder:

    from zerojax.configs import base
"""

import ast
import importlib
import pathlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import ml_collections

_HERE = pathlib.Path(__file__).parent
FOLDER = next(folder / "configs" for folder in (_HERE, _HERE.parents[1]) if (folder / "configs" / "base.py").is_file())
__path__ = [str(FOLDER)]


def names() -> list[str]:
    """Returns the names of all configs, in the order of the alphabet."""
    return sorted(path.stem for path in FOLDER.glob("*.py"))


def path(name: str) -> pathlib.Path:
    """Returns the file of a config."""
    return FOLDER / f"{name}.py"


def summary(name: str) -> str:
    """Returns the first line of a config's docstring."""
    return (ast.get_docstring(ast.parse(path(name).read_text())) or "").partition("\n")[0]


def get(name: str) -> "ml_collections.ConfigDict":
    """Returns the settings of a config, a new `ml_collections.ConfigDict`."""
    return importlib.import_module(f"{__name__}.{name}").get_config()
