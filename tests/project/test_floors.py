"""Checks that no version of a dependency that pyproject.toml lets in has a known hole. This module reads the file."""

import itertools
import pathlib
import tomllib

from packaging.requirements import Requirement
from packaging.version import Version

FILE = pathlib.Path(__file__).parents[2] / "pyproject.toml"
# package -> (its first version without a known hole, the last advisory of those before). A new one changes this table and a floor.
SAFE = {
    "h11": ("0.16.0", "CVE-2025-43859"),
    "jinja2": ("3.1.6", "CVE-2025-27516"),
    "mlflow": ("3.13.0", "CVE-2026-8147"),
    "numpy": ("1.22.2", "CVE-2021-41495"),
    "pdoc": ("14.5.1", "CVE-2024-38526"),
    "pyarrow": ("23.0.1", "CVE-2026-25087"),
    "pytest": ("9.0.3", "CVE-2025-71176"),
    "pyyaml": ("5.4", "CVE-2020-14343"),
    "ray": ("2.55.0", "CVE-2026-32981"),
    "setuptools": ("83.0.0", "CVE-2026-59890"),
    "starlette": ("1.3.1", "CVE-2026-54283"),
    "transformers": ("5.3.0", "CVE-2026-4372"),
    "uvicorn": ("0.11.7", "CVE-2020-7694"),
}


def requirements():
    """Returns all requirements of the project: to build, to run, and of its extras."""
    found = tomllib.loads(FILE.read_text())
    project = found["project"]
    extras = itertools.chain(*project["optional-dependencies"].values())
    return [Requirement(line) for line in (*found["build-system"]["requires"], *project["dependencies"], *extras)]


def floor(requirement):
    """Returns the lowest version that a requirement lets in; that of `==0.17.*` is 0.17."""
    lowest = [
        Version(one.version.removesuffix(".*")) for one in requirement.specifier if one.operator in (">=", "==", "~=")
    ]
    return max(lowest, default=Version("0"))


def test_floors_have_no_known_hole():
    known = [requirement for requirement in requirements() if requirement.name.lower() in SAFE]
    assert {requirement.name.lower() for requirement in known} == SAFE.keys()
    open_ones = {
        f"{requirement}: {SAFE[requirement.name.lower()]}"
        for requirement in known
        if floor(requirement) < Version(SAFE[requirement.name.lower()][0])
    }
    assert not open_ones
