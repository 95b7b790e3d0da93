"""Pins each extra with hashes, and lists what it installs. This module writes scripts/constraints/EXTRA.txt with pip's resolver.

    python scripts/constraints.py --python python3.11 --python python3.12        all extras anew, "base" for none
    python scripts/constraints.py --only serve --python python3.12               some
    python scripts/constraints.py --sbom serve > sbom.json                       a CycloneDX list of one, from its file

Installing from such a file takes what was resolved, or nothing:

    pip install --require-hashes -r scripts/constraints/serve.txt

and docs/security.md says how to build this project itself with known files alone.

The hashes are those of the files that pip chooses for the given Pythons on the machine where the script runs. Another machine
(macOS, aarch64) makes its own. pip finds its index as it always does; the files name none.
"""

import argparse
import datetime
import importlib.metadata
import json
import pathlib
import re
import subprocess
import sys
import tempfile
import tomllib
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[1]
FOLDER = ROOT / "scripts" / "constraints"
BASE = "base"  # no extra
LINE = re.compile(
    r"^(?P<name>[\w.-]+)==(?P<version>[^ ]+)(?: ; python_version == '(?P<python>[\d.]+)')?(?P<hashes>(?: --hash=sha256:[0-9a-f]{64})+)$"
)


class Pin(NamedTuple):
    """A package: its name in PEP 503's form, its version, the Pythons that take it ("" for all), and the SHA-256 of its files."""

    name: str
    version: str
    python: str
    hashes: tuple[str, ...]


def extras() -> list[str]:
    """Returns the names of all extras, "base" first."""
    return [BASE, *tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]]


def resolved(extra: str, python: str) -> tuple[str, dict[tuple[str, str], str]]:
    """Asks pip what an extra would install. Returns (the Python's version, {(name, version): SHA-256})."""
    wanted = f"{ROOT}[{extra}]" if extra != BASE else str(ROOT)
    with tempfile.NamedTemporaryFile(suffix=".json") as report:
        pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "--dry-run", "--ignore-installed", "--report", report.name, wanted], check=True)
        return read(json.loads(pathlib.Path(report.name).read_text()))


def read(report: Mapping[str, Any]) -> tuple[str, dict[tuple[str, str], str]]:
    """Reads a report of pip. What has no archive, as this project itself, is left out."""
    found = {}
    for one in report["install"]:
        if "archive_info" in one["download_info"]:
            name = re.sub(r"[-_.]+", "-", one["metadata"]["name"]).lower()
            found[name, one["metadata"]["version"]] = one["download_info"]["archive_info"]["hashes"]["sha256"]
    return report["environment"]["python_version"], found


def merged(found: Mapping[str, Mapping[tuple[str, str], str]]) -> list[Pin]:
    """Returns the pins of several Pythons: one a package where all take one version, else one a Python."""
    packages = sorted({package for one in found.values() for package in one})
    pins = []
    for package in packages:
        takers = [python for python, one in found.items() if package in one]
        hashes = {python: found[python][package] for python in takers}
        for pythons in [takers] if len(takers) == len(found) else [[python] for python in takers]:
            marker = "" if len(takers) == len(found) else pythons[0]
            pins.append(Pin(*package, marker, tuple(sorted({hashes[python] for python in pythons}))))
    return pins


def text(pins: Iterable[Pin]) -> str:
    """Returns the lines of a file that pip reads with -r or -c."""
    lines = []
    for pin in pins:
        marker = f" ; python_version == '{pin.python}'" if pin.python else ""
        lines.append(f"{pin.name}=={pin.version}{marker}" + "".join(f" --hash=sha256:{one}" for one in pin.hashes))
    return "\n".join(lines) + "\n"


def pins_of(extra: str) -> list[Pin]:
    """Reads the committed file of an extra."""
    found = [LINE.match(line) for line in (FOLDER / f"{extra}.txt").read_text().splitlines()]
    return [
        Pin(one["name"], one["version"], one["python"] or "", tuple(re.findall(r"[0-9a-f]{64}", one["hashes"])))
        for one in found
    ]


def sbom(extra: str, pins: Sequence[Pin]) -> dict[str, Any]:
    """Returns a CycloneDX 1.5 document. Licences are those that the packages of this environment state, where it has the same version."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    name = project["name"] if extra == BASE else f"{project['name']}[{extra}]"
    components = [
        {
            "type": "library",
            "bom-ref": f"pkg:pypi/{pin.name}@{pin.version}",
            "name": pin.name,
            "version": pin.version,
            "purl": f"pkg:pypi/{pin.name}@{pin.version}",
            "hashes": [{"alg": "SHA-256", "content": one} for one in pin.hashes],
            **({"licenses": [{"license": {"name": licence}}]} if (licence := _licence(pin)) else {}),
        }
        for pin in pins
    ]
    own = {"type": "library", "bom-ref": name, "name": name, "version": project["version"]}
    contents = json.dumps([own, components])
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_OID, contents)}",
        "version": 1,
        "metadata": {
            "timestamp": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "component": {**own, "licenses": [{"license": {"id": project["license"]}}]},
        },
        "components": components,
        "dependencies": [{"ref": name, "dependsOn": [one["bom-ref"] for one in components]}],
    }


def _licence(pin: Pin) -> str:
    try:
        found = importlib.metadata.metadata(pin.name)
    except importlib.metadata.PackageNotFoundError:
        return ""
    stated = found.get("License-Expression") or (found.get("License") or "").strip()
    is_name = (
        found["Version"] == pin.version and 0 < len(stated) <= 60 and "\n" not in stated
    )  # some state the whole text
    return stated if is_name else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="some extras, with commas")
    parser.add_argument("--python", action="append", metavar="PYTHON", help="resolve for it; may be given again")
    parser.add_argument("--sbom", metavar="EXTRA", help="print the list of one extra, and resolve nothing")
    given = parser.parse_args()
    if given.sbom:
        return print(json.dumps(sbom(given.sbom, pins_of(given.sbom)), indent=1))
    FOLDER.mkdir(exist_ok=True)
    for extra in given.only.split(",") if given.only else extras():
        found = dict(resolved(extra, python) for python in given.python or [sys.executable])
        (FOLDER / f"{extra}.txt").write_text(text(merged(found)))
        print(f"{extra}: {', '.join(f'{len(one)} packages on Python {python}' for python, one in found.items())}")


if __name__ == "__main__":
    main()
