"""Holds the house together: floors, who may say what, and how long things are. This module reads the source, and runs none of it."""

import ast
import functools
import importlib
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parent.parent
PACKAGE = ROOT / "zerojax"

# A module imports lower floors only.
FLOORS = (
    {"errors", "specs", "tree", "accelerators", "embedding"}
    | {"buffer_dump", "flops", "phases", "traces", "gpu_configs", "hlo", "losses", "products"}
    | {"events", "remat", "replica_groups", "startup", "timing", "xla_options"},
    {"blocks", "export", "generate", "launch", "loss_scale", "mesh", "metrics", "models.llama", "plot"}
    | {"precision", "settings", "state", "step_files", "stored", "workdir", "command", "data.python_stdlib", "data.tokenizer"}
    | {"hlo_flow", "kernels", "parameters", "quantized"},
    {"accumulate", "checkpoint", "config", "data.source", "gather", "models.presets", "shards", "update"}
    | {"buffer_roles", "collectives", "targets"},
    {"data.batches", "fused", "partition", "used"}
    | {"attribution", "bound", "buffers"},
    {"chain", "optim", "place", "report"},
    {"per_device"},
    {"step"},
    {"program"},
    {"ledger"},
    {"departures", "finding", "breakdown"},
    {"state_rules", "traffic_rules", "profiling"},
    {"findings"},
    {"planning"},
    {"plan_report", "search"},
    {"foresight"},
    {"streams"},
    {"resume"},
    {"loop"},
    {"train", "plan"},
)  # fmt: skip
FLOOR = {name: number for number, names in enumerate(FLOORS) for name in names}
COMMAND_LINES = {"train", "plan"}  # define flags; imported by nobody
KNOW_FLAGS = COMMAND_LINES | {"command"}
KNOW_THEIR_PROCESS = {"checkpoint", "data", "export", "launch", "loop", "metrics", "step_files", "streams", "train"}
KNOW_STAGES = {"config", "partition", "place", "program", "report"}  # may say the word in code
KNOW_STAGES |= {"foresight", "plan", "plan_report", "planning", "search"}
LONGEST_FILE, LONGEST_FUNCTION, TRAIN_STEP = 300, 60, 40


def module_name(path: pathlib.Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py")) if path.name != "__init__.py"}
KERNELS = sorted((ROOT / "pallas_kernels").rglob("*.py"))


@functools.cache
def parse(path: pathlib.Path) -> ast.Module:
    return ast.parse(path.read_text())


def imports(path: pathlib.Path) -> set[str]:
    """Returns the dotted names that a file imports, `from a import b` as a.b and as a."""
    found: set[str] = set()
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            found |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def own_imports(path: pathlib.Path) -> set[str]:
    """Returns the modules of the package that a file imports."""
    names = {name.removeprefix("zerojax.") for name in imports(path) if name.startswith("zerojax.")}
    return {name for name in names if name in MODULES}


def functions(path: pathlib.Path) -> dict[str, ast.FunctionDef]:
    return {node.name: node for node in ast.walk(parse(path)) if isinstance(node, ast.FunctionDef)}


def lines_of(function: ast.FunctionDef) -> int:
    """Counts the lines of a function without its docstring."""
    docstring = function.body[0] if ast.get_docstring(function) else None
    told = docstring.end_lineno - docstring.lineno + 1 if docstring else 0
    return function.end_lineno - function.lineno + 1 - told


def test_every_module_has_one_floor():
    assert not set(MODULES) - set(FLOOR)
    assert len(FLOOR) == sum(len(names) for names in FLOORS)


@pytest.mark.parametrize("name", MODULES)
def test_a_module_imports_lower_floors_only(name):
    above = {found for found in own_imports(MODULES[name]) if FLOOR[found] >= FLOOR[name]}
    assert not above, f"{name} (floor {FLOOR[name]}) imports {above}"


def test_command_lines_are_imported_by_nobody_and_alone_define_flags():
    for path in [*MODULES.values(), PACKAGE / "__init__.py"]:
        assert not own_imports(path) & COMMAND_LINES, path
        has_flags = any(
            part in found.split(".") for found in imports(path) for part in ("flags", "config_flags", "argparse")
        )
        assert not has_flags or module_name(path) in KNOW_FLAGS, path


def test_all_modules_can_be_imported_by_one_process():
    """As the builder of the API pages does."""
    for name in MODULES:
        importlib.import_module(f"zerojax.{name}")


@pytest.mark.parametrize("path", KERNELS, ids=lambda path: path.name)
def test_kernels_import_nothing_of_the_library(path):
    assert not {name for name in imports(path) if name.split(".")[0] in ("zerojax", "flax", "optax")}


def test_only_some_modules_ask_which_process_they_are():
    for name, path in MODULES.items():
        if "jax.process_index" in path.read_text():
            assert name in KNOW_THEIR_PROCESS or name.split(".")[0] in KNOW_THEIR_PROCESS, name


def test_one_module_holds_the_table_of_stages_and_no_other_compares_a_stage_with_a_number():
    for name, path in MODULES.items():
        for node in ast.walk(parse(path)):
            if isinstance(node, (ast.Assign, ast.AnnAssign)):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                is_table = isinstance(node.value, ast.Dict) and "STAGES" in [ast.unparse(t) for t in targets]
                assert not is_table or name == "partition", name
            if isinstance(node, (ast.Compare, ast.Match)):
                words = ast.unparse(node).replace(".", " ").split()
                numbers = [n for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, int)]
                assert not (any("stage" in word for word in words) and numbers), f"{name}: {ast.unparse(node)}"


def test_few_modules_know_what_a_stage_is():
    for name, path in MODULES.items():
        words = {n.id for n in ast.walk(parse(path)) if isinstance(n, ast.Name)}
        words |= {n.attr for n in ast.walk(parse(path)) if isinstance(n, ast.Attribute)}
        words |= {n.arg for n in ast.walk(parse(path)) if isinstance(n, (ast.arg, ast.keyword))}
        assert not words & {"stage", "STAGES"} or name in KNOW_STAGES, name


def test_the_models_know_nothing_of_meshes_or_sharding():
    for name, path in MODULES.items():
        if name.startswith("models."):
            words = path.read_text().partition('"""')[2].partition('"""')[2]
            assert not [word for word in ("sharding", "Mesh", "checkpoint", "remat", "psum") if word in words], name


def test_the_inner_train_step_fits_one_screen():
    assert lines_of(functions(MODULES["step"])["train_step"]) <= TRAIN_STEP


@pytest.mark.parametrize("path", [*MODULES.values(), *KERNELS, *sorted((ROOT / "scripts").glob("*.py"))], ids=str)
def test_files_and_functions_are_short(path):
    assert len(path.read_text().splitlines()) <= LONGEST_FILE
    long = {name: lines_of(function) for name, function in functions(path).items()}
    assert not {name: lines for name, lines in long.items() if lines > LONGEST_FUNCTION}


def test_no_private_part_of_jax_is_used():
    private = "jax." + "_src"
    for folder in ("zerojax", "pallas_kernels", "configs", "examples", "scripts", "tests"):
        for path in (ROOT / folder).rglob("*.py"):
            assert private not in path.read_text(), path


@pytest.mark.parametrize("name", MODULES)
def test_every_module_has_tests_of_its_name(name):
    *folders, last = name.split(".")
    assert (ROOT / "tests" / pathlib.Path(*folders) / f"test_{last}.py").is_file()


@pytest.mark.parametrize("name", MODULES)
def test_the_first_paragraph_says_what_a_module_does(name):
    assert "This module" in (ast.get_docstring(parse(MODULES[name])) or "").split("\n\n")[0]


def test_the_public_names_are_those_imported():
    tree = parse(PACKAGE / "__init__.py")
    public = next(ast.literal_eval(node.value) for node in tree.body if isinstance(node, ast.Assign))
    imported = [alias.name for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names]
    assert sorted(imported) == sorted(public) == public
