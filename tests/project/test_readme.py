"""Tests README.md and docs/: code that runs, and commands, settings and links that exist."""

import functools
import importlib.util
import operator
import os
import pathlib
import pkgutil
import re
import subprocess
import sys
import tomllib

import pytest
import rough

import zerojax
from configs import base
from zerojax.trainer import workdir
from zerojax.zero import stages

ROOT = pathlib.Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
TRAIN = "python -m zerojax.train --config configs/zero3.py"
TEST = 'pip install -e ".[test]" && python -m pytest -n 3'
LIMIT = 240  # seconds; code that takes longer hangs


def blocks(page, language):
    """Returns the fenced blocks of a page in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


def command_lines():
    return [line for page in PAGES for block in blocks(page, "bash") for line in block.splitlines()]


def words(pattern):
    return sorted({word for page in PAGES for word in re.findall(pattern, page.read_text())})


def prose_names(pattern):
    """Returns what matches in backticks outside fenced blocks."""
    text = "".join(re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL) for page in PAGES)
    return sorted(set(re.findall(pattern, text)))


@pytest.fixture(scope="module")
def run_code(commands, tmp_path_factory):
    """Returns f(page) -> (status, stdout, stderr): runs the page's Python blocks as one program, once, in a folder of its own."""
    return functools.cache(lambda page: _run(page, commands, tmp_path_factory.mktemp(page.stem)))


def _run(page, commands, folder):
    (folder / "my-model").symlink_to(ROOT / "tests" / "golden" / "huggingface" / "llama")
    code = "\n".join(blocks(page, "python"))
    if page != README:
        done = commands.python(code, folder)
        return done.status, done.out, done.err
    environ = {**os.environ, "XLA_FLAGS": rough.XLA_FLAGS, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=LIMIT)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(
            page, marks=() if page.name in ("README.md", "own_model.md", "fine_tuning.md") else pytest.mark.long
        )
        for page in PAGES
        if blocks(page, "python")
    ],
    ids=lambda page: page.name,
)
def test_python_blocks_of_a_page_run_unchanged(page, run_code):
    status, _, err = run_code(page)
    assert (status, err) == (0, "")


def test_readme_example_learns_on_eight_emulated_devices(run_code):
    out = run_code(README)[1]
    losses = [float(loss) for loss in re.findall(r"^\d+ ([\d.]+)$", out, re.MULTILINE)]
    assert len(losses) == 20
    assert losses[-1] < 0.5 * losses[0]
    assert "(32, 1024) of (256, 1024)" in out
    assert "stage 3, data=8" in out


def test_readme_shows_the_two_commands_and_ci_runs_the_second():
    commands = "".join(blocks(README, "bash")).splitlines()
    assert commands[0].startswith("python3 -m venv .venv && source .venv/bin/activate && pip install -e . && ")
    assert commands[0].endswith(TRAIN)
    assert commands[1] == TEST
    *_, last = (ROOT / ".ci" / "run").read_text().strip().splitlines()
    assert last.replace(" --quiet --disable-pip-version-check --no-compile", "") == TEST
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def test_every_module_that_a_command_runs_exists():
    modules = set(words(r"python3? -m ([\w.]+)"))
    assert modules and not [name for name in modules - {"pre_commit", "mypy"} if not importlib.util.find_spec(name)]


def test_every_path_that_is_named_exists():
    paths = words(r"(?<![\w/])((?:scripts|configs|examples|docs|tests|zerojax)/[\w/.-]*\w/?)")
    assert paths and not [path for path in paths if not (ROOT / path).exists()]


def test_every_function_that_estimates_exists():
    names = re.findall(r"`((?:[a-z_\d]+\.)+\w+)`", (ROOT / "docs" / "estimators.md").read_text())
    assert len(names) > 30 and all(pkgutil.resolve_name(f"zerojax.{name}") for name in names)


def test_every_setting_that_is_named_exists():
    keys, config = words(r"`config\.((?!(?:json|py)\b)\w[\w.]*\w)"), base.get_config()
    assert keys
    for key in keys:
        operator.attrgetter(key)(config)


def test_every_override_has_the_type_of_its_setting():
    overrides, config = words(r"--config\.([\w.]+=[^\s`]+)"), base.get_config()
    assert overrides
    for override in overrides:
        key, value = override.split("=")
        type(operator.attrgetter(key)(config))(value)


def test_the_settings_that_may_change_are_those_of_the_code():
    text = (ROOT / "docs" / "configuration.md").read_text().split("## What may change when a run resumes")[1]
    listed = re.findall(r"`([\w.]+)`", re.sub(r"\(.*?\)", "", text.split("A change of any other")[0], flags=re.DOTALL))
    assert sorted(listed) == sorted(workdir.FREE)


def test_every_public_name_that_is_mentioned_exists():
    names = prose_names(r"`zerojax\.(\w+)")
    known = {name for name in names if hasattr(zerojax, name) or importlib.util.find_spec(f"zerojax.{name}")}
    assert names and not set(names) - known


def test_every_extra_that_is_installed_exists():
    project, extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"], words(r"\.\[(\w+)\]")
    assert extras and not set(extras) - project["optional-dependencies"].keys()


def test_links_to_files_lead_somewhere():
    links = [(page, link) for page in PAGES for link in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text())]
    dead = [(page.name, link) for page, link in links if "://" not in link and not (page.parent / link).exists()]
    assert links and not dead


def test_links_to_headings_lead_somewhere():
    links = [
        (page, page.parent / file if file else page, anchor)
        for page in PAGES
        for file, anchor in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", page.read_text())
    ]
    assert links and not [(page.name, anchor) for page, file, anchor in links if anchor not in anchors(file)]


def anchors(page):
    """Returns the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(
        r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL), re.MULTILINE
    )
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_a_table_ends_with_an_empty_line():
    glued = [
        (page.name, line) for page in PAGES for line in re.findall(r"^\|.*\n([^|\n].*)", page.read_text(), re.MULTILINE)
    ]
    assert not glued


def test_the_table_of_stages_is_the_one_in_the_code():
    rows = re.findall(r"^\| (\d) \| (\w+) \| (\w+) \| (\w+)", README.read_text(), re.MULTILINE)
    shown = {int(stage): tuple(word == "sharded" for word in roles) for stage, *roles in rows}
    assert shown == {stage: (s.opt_state, s.grads, s.params) for stage, s in stages.STAGES.items()}
