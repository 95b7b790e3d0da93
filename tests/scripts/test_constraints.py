"""Checks the versions and hashes of each extra, and the list of packages made of them. This module tests scripts/constraints.py."""

import pathlib
import re
import sys
import tomllib

import pytest
from packaging.requirements import Requirement

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "scripts"))

import constraints

PROJECT = tomllib.loads((constraints.ROOT / "pyproject.toml").read_text())["project"]
PYTHONS = ("3.11", "3.12")
NUMPY, JAX, TOMLI = ("numpy", "2.1"), ("jax", "0.10.2"), ("tomli", "2")


def requirements(extra, python):
    """Returns the requirements of an extra on a Python, with those of the extras of this project that it names."""
    lines = PROJECT["dependencies"] if extra == constraints.BASE else PROJECT["optional-dependencies"][extra]
    for one in map(Requirement, lines):
        if one.marker and not one.marker.evaluate({"python_version": python, "sys_platform": "linux"}):
            continue
        if one.name == PROJECT["name"]:
            for inner in one.extras:
                yield from requirements(inner, python)
        else:
            yield one


@pytest.mark.parametrize("extra", constraints.extras())
@pytest.mark.parametrize("python", PYTHONS)
def test_the_versions_of_an_extra_are_those_that_the_project_lets_in(extra, python):
    pins = [pin for pin in constraints.pins_of(extra) if pin.python in ("", python)]
    versions = {pin.name: pin.version for pin in pins}
    assert len(versions) == len(pins)
    wanted = [
        *requirements(constraints.BASE, python),
        *(requirements(extra, python) if extra != constraints.BASE else ()),
    ]
    refused = [
        str(one)
        for one in wanted
        if not one.specifier.contains(versions.get(re.sub(r"[-_.]+", "-", one.name).lower(), "0"), prereleases=True)
    ]
    assert not refused


def test_the_files_hold_names_versions_and_hashes_alone_and_are_those_of_the_extras():
    assert {path.stem for path in constraints.FOLDER.iterdir()} == {*constraints.extras()}
    for extra in constraints.extras():
        lines = (constraints.FOLDER / f"{extra}.txt").read_text().splitlines()
        assert lines and all(map(constraints.LINE.match, lines)) and "://" not in "".join(lines)
        assert constraints.text(constraints.pins_of(extra)).splitlines() == lines


def test_pythons_that_take_one_version_share_a_line_and_others_have_their_own():
    found = {
        "3.11": {NUMPY: "a" * 64, JAX: "c" * 64, TOMLI: "d" * 64},
        "3.12": {NUMPY: "b" * 64, ("jax", "0.12"): "e" * 64},
    }
    assert constraints.text(constraints.merged(found)).splitlines() == [
        f"jax==0.10.2 ; python_version == '3.11' --hash=sha256:{'c' * 64}",
        f"jax==0.12 ; python_version == '3.12' --hash=sha256:{'e' * 64}",
        f"numpy==2.1 --hash=sha256:{'a' * 64} --hash=sha256:{'b' * 64}",
        f"tomli==2 ; python_version == '3.11' --hash=sha256:{'d' * 64}",
    ]


def test_a_report_of_pip_gives_names_in_one_form_and_leaves_out_what_has_no_archive():
    archive = {"archive_info": {"hashes": {"sha256": "a" * 64}}}
    own = {"metadata": {"name": "zerojax", "version": "1"}, "download_info": {"dir_info": {}}}
    other = {"metadata": {"name": "Ml_Dtypes", "version": "0.5"}, "download_info": archive}
    report = {"environment": {"python_version": "3.11"}, "install": [own, other]}
    assert constraints.read(report) == ("3.11", {("ml-dtypes", "0.5"): "a" * 64})


def test_the_list_of_packages_names_each_with_its_version_and_hashes():
    pins = constraints.pins_of("serve")
    found = constraints.sbom("serve", pins)
    assert (found["bomFormat"], found["specVersion"], found["version"]) == ("CycloneDX", "1.5", 1)
    assert re.fullmatch(r"urn:uuid:[0-9a-f-]{36}", found["serialNumber"])
    components = found["components"]
    assert [(one["name"], one["version"]) for one in components] == [pin[:2] for pin in pins]
    assert all(one["purl"] == f"pkg:pypi/{one['name']}@{one['version']}" == one["bom-ref"] for one in components)
    assert [[one["content"] for one in part["hashes"]] for part in components] == [[*pin.hashes] for pin in pins]
    assert found["dependencies"][0]["dependsOn"][0] == components[0]["bom-ref"]
    serials = [constraints.sbom("serve", some)["serialNumber"] for some in (pins, pins[1:])]
    assert found["serialNumber"] == serials[0] != serials[1]
