"""Checks the architecture: imports between rooms, which module may use which names, and sizes. This module reads the source without
running it."""

import ast
import functools
import graphlib
import importlib
import importlib.util
import pathlib
import re

import pytest

import zerojax
from zerojax.trainer import settings

ROOT = pathlib.Path(__file__).parents[2]
PACKAGE = ROOT / "zerojax"

# room -> the other rooms that it may import. Every room may import the ground.
GROUND = {
    "bounded",
    "display",
    "errors",
    "files",
    "jitted",
    "kinds",
    "mesh",
    "precision",
    "roles",
    "signatures",
    "specs",
    "train_state",
    "traces",
    "tree",
    "xla_flags",
}
KERNELS = "pallas_kernels"
ROOMS: dict[str, set[str]] = {
    "ops": {KERNELS},
    "hlo": set(),
    "clock": {"hlo"},
    "launch": set(),
    "data": set(),
    "optim": {KERNELS},
    "models": {"ops", KERNELS},
    "checkpoint": {"optim"},
    "zero": {"optim", "ops"},
    "lora": {"ops", "models", "zero"},
    "inference": {"ops", "models", "zero", KERNELS},
    "interop": {"ops", "models", "lora", "checkpoint", "zero", "inference"},
    "serve": {"launch", "data", "inference", "interop"},
    "plan": {"ops", "hlo", "clock", "zero", "launch"},
    "profile": {"hlo", "clock", "zero", "launch", "plan"},
    "trainer": {
        "ops",
        "hlo",
        "clock",
        "launch",
        "data",
        "optim",
        "models",
        "lora",
        "checkpoint",
        "zero",
        "inference",
        "interop",
        "plan",
        "profile",
    },
}
# Rooms inside of zero, from the lowest: those before it in this list that each may import. None imports the root, which holds the public
# calls.
INSIDE_ZERO: dict[str, set[str]] = {
    "weights": set(),
    "host": {"weights"},
    "sharded_batch": {"weights"},
    "blocks": {"weights", "sharded_batch"},
    "wires": {"weights", "blocks"},
    "fp8": {"weights", "blocks", "wires"},
    "update": {"weights", "host"},
    "gradients": {"weights", "sharded_batch", "blocks"},
    "step_programs": {
        "weights",
        "sharded_batch",
        "blocks",
        "gradients",
    },  # programs in an order, wherever a state is stored
    "offload": {"weights", "host", "sharded_batch", "blocks", "update", "gradients", "step_programs"},
    "pipeline": {"weights", "host", "sharded_batch", "blocks", "update", "gradients", "step_programs", "offload"},
}
# Rooms inside of the trainer: which others each may import, "" for the modules at its root.
INSIDE_TRAINER: dict[str, set[str]] = {"clients": set(), "": {"clients"}, "tuning": {""}, "checks": {""}, "card": {""}}
PUBLIC_CALLS_OF_ZERO = {"compare", "shard_state", "stages", "state_bytes", "step", "step_values"}
HOST_WORDS = ("host", "pinned", "disk", "offload")
# No training step enters these, and only command lines import them (and `zerojax`, one function).
ROOMS["migration"] = {"optim", "zero", "interop"}
ROOMS["cluster"] = {"launch"}
ROOMS["commands"] = {*ROOMS, KERNELS}  # `calibrate` times a kernel
# Command lines define flags, and no module imports them; `commands.arguments` and `commands.facts` are what they share.
COMMAND_LINES = {"__main__", "train", "plan.__main__"} | {
    f"commands.{path.stem}"
    for path in (PACKAGE / "commands").glob("*.py")
    if path.stem not in ("__init__", "arguments", "facts")
}
KNOW_FLAGS = COMMAND_LINES | {"trainer.command", "commands.arguments"}
KNOW_THEIR_PROCESS = {"checkpoint", "cluster.probe", "data", "interop", "launch", "trainer", "train"}
KNOW_STAGES = {
    "zero.stages",
    "zero.weights.partition",
    "zero.shard_state",
    "zero.state_bytes",
    "migration.own_step",  # DeepSpeed's word too
    "migration.translate",
    "interop.pretrained",
    "trainer",
    "plan",
    "commands",
}  # may use the name `stage` in code
TRAIN_STEP = 40  # lines: one screen
AXES = {"replica", "data", "context", "model"}  # of a mesh


def module_name(path: pathlib.Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py")) if path.name != "__init__.py"}
KERNELS_FILES = sorted((ROOT / "pallas_kernels").rglob("*.py"))


@functools.cache
def parse(path: pathlib.Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
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


def room_of(name: str) -> str:
    """Returns the folder of a module, "" for the ground and the command lines beside it."""
    return name.split(".")[0] if "." in name else ""


def test_every_folder_is_a_room_and_every_module_beside_them_is_ground_or_a_command_line():
    assert {room_of(name) for name in MODULES} - {""} == set(ROOMS)
    assert {name for name in MODULES if not room_of(name)} == GROUND | {"__main__", "train"}


def test_a_module_imports_what_its_room_may():
    above = {}
    for name, path in MODULES.items():
        roots = {"train": set(ROOMS), "plan.__main__": set(ROOMS), "__main__": {"launch"}}
        allowed = roots.get(name, ROOMS.get(room_of(name), set()))
        rooms = {found: room_of(found) for found in own_imports(path) - GROUND}
        above[name] = {found for found, room in rooms.items() if room not in allowed | {room_of(name)} or not room}
    assert not {name: found for name, found in above.items() if found}


def test_kernels_are_imported_where_a_row_says_so():
    using = {name for name, path in MODULES.items() if any(found.split(".")[0] == KERNELS for found in imports(path))}
    assert using and not {name for name in using if KERNELS not in ROOMS.get(room_of(name), set())}


def test_no_room_imports_itself_in_a_circle():
    """Neither rooms nor modules have import cycles, so an imported module can be understood first."""
    graph = {name: own_imports(path) for name, path in MODULES.items()}
    graph |= {
        room: {
            room_of(f)
            for n, p in MODULES.items()
            if room_of(n) == room and n not in COMMAND_LINES
            for f in own_imports(p)
        }
        - {room, ""}
        for room in ROOMS
    }
    graphlib.TopologicalSorter(graph).prepare()


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_states_what_it_holds_what_it_does_not_and_where_to_add(room):
    doc = ast.get_docstring(parse(PACKAGE / room / "__init__.py")) or ""
    assert len(re.findall(r"[.](?=\s|$)", doc)) >= 3, doc
    assert not [node for node in parse(PACKAGE / room / "__init__.py").body if not isinstance(node, ast.Expr)]


def test_command_lines_are_never_imported_and_only_they_define_flags():
    for path in [*MODULES.values(), PACKAGE / "__init__.py"]:
        assert not own_imports(path) & COMMAND_LINES, path
        has_flags = any(
            part in found.split(".") for found in imports(path) for part in ("flags", "config_flags", "argparse")
        )
        assert not has_flags or module_name(path) in KNOW_FLAGS, path


def test_all_modules_can_be_imported_by_one_process():
    """The builder of the API pages imports all modules."""
    for name in MODULES:
        importlib.import_module(f"zerojax.{name}")


def test_programs_inside_strings_import_what_exists():
    """Tests and benchmarks start processes whose program is a string, which no linter reads."""
    missing = set()
    for path in sorted([*(ROOT / "tests").rglob("*.py"), *(ROOT / "scripts").rglob("*.py")]):
        for module, names in re.findall(r"^ *from (zerojax[\w.]*) import ([\w, ]+)$", path.read_text(), re.MULTILINE):
            found = importlib.import_module(module)
            for name in re.findall(r"(\w+)(?: as \w+)?", names):
                if not hasattr(found, name) and importlib.util.find_spec(f"{module}.{name}") is None:
                    missing.add(f"{path.relative_to(ROOT)}: {module}.{name}")
    assert not missing


@pytest.mark.parametrize("path", KERNELS_FILES, ids=lambda path: path.name)
def test_kernels_import_nothing_of_the_library(path):
    assert not {name for name in imports(path) if name.split(".")[0] in ("zerojax", "flax", "optax")}


def test_few_modules_name_the_hosts_memory():
    """Others ask `zero.host.memory_kind` or compare an array's memory kind with its device's default."""
    known = {"zero.host.memory_kind", "zero.blocks.marks"}
    assert {name for name, path in MODULES.items() if '"pinned_host"' in path.read_text()} <= known


def test_rooms_inside_zero_import_those_of_their_rows_and_no_public_call():
    for name, path in MODULES.items():
        room, *rest = name.removeprefix("zero.").split(".")
        if name.startswith("zero.") and rest:
            inside = {other.split(".")[1] for other in own_imports(path) if other.startswith("zero.")}
            assert inside - {room} <= INSIDE_ZERO[room], name


def test_the_root_of_zero_holds_the_public_calls_and_its_rooms_stand_in_order():
    inside = [name.split(".")[1:] for name in MODULES if name.startswith("zero.")]
    assert {first for first, *rest in inside if not rest} == PUBLIC_CALLS_OF_ZERO
    assert {first for first, *rest in inside if rest} == INSIDE_ZERO.keys()
    order = list(INSIDE_ZERO)
    assert not [room for room, lower in INSIDE_ZERO.items() if not lower <= {*order[: order.index(room)]}]


def test_rooms_inside_the_trainer_import_those_of_their_rows():
    for name, path in MODULES.items():
        if name.startswith("trainer."):
            room, *inside = [
                other.split(".")[1] if other.count(".") > 1 else ""
                for other in (name, *own_imports(path))
                if other.startswith("trainer.")
            ]
            assert {*inside} - {room} <= INSIDE_TRAINER[room], name


def test_the_parts_of_a_step_do_not_know_where_a_state_is_stored():
    for path in sorted((PACKAGE / "zero/step_programs").glob("*.py")):
        assert not [word for word in HOST_WORDS if word in path.read_text().lower()], path


def test_only_some_modules_ask_which_process_they_are():
    for name, path in MODULES.items():
        if "jax.process_index" in path.read_text():
            assert name in KNOW_THEIR_PROCESS or name.split(".")[0] in KNOW_THEIR_PROCESS, name


def test_one_module_holds_the_table_of_stages_and_no_other_compares_a_stage_with_a_number():
    for name, path in MODULES.items():
        if name.startswith("zero.pipeline."):  # its stages are those of a pipeline
            continue
        for node in ast.walk(parse(path)):
            if isinstance(node, (ast.Assign, ast.AnnAssign)):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                is_table = isinstance(node.value, ast.Dict) and "STAGES" in [ast.unparse(t) for t in targets]
                assert not is_table or name == "zero.stages", name
            if isinstance(node, (ast.Compare, ast.Match)):
                words = ast.unparse(node).replace(".", " ").split()
                numbers = [n for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, int)]
                assert not (any("stage" in word for word in words) and numbers), f"{name}: {ast.unparse(node)}"


def test_few_modules_know_what_a_stage_is():
    for name, path in MODULES.items():
        words = {n.id for n in ast.walk(parse(path)) if isinstance(n, ast.Name)}
        words |= {n.attr for n in ast.walk(parse(path)) if isinstance(n, ast.Attribute)}
        words |= {n.arg for n in ast.walk(parse(path)) if isinstance(n, (ast.arg, ast.keyword))}
        is_known = {name, room_of(name)} & KNOW_STAGES or name.startswith("zero.pipeline.")
        assert not words & {"stage", "STAGES"} or is_known, name


def test_the_models_know_nothing_of_meshes_or_sharding():
    for name, path in MODULES.items():
        if name.startswith("models."):
            words = path.read_text().partition('"""')[2].partition('"""')[2]
            assert not [word for word in ("sharding", "Mesh", "checkpoint", "remat", "psum") if word in words], name


def test_an_axis_is_compared_only_in_the_table_of_axes():
    """A new axis is a row of `mesh.AXES`. Which axes something runs over is a column of it."""
    for name, path in MODULES.items():
        if room_of(name) in {
            "",
            "commands",
            "data",
            "interop",
            "launch",
        }:  # they know settings and files of these names
            continue
        for node in ast.walk(parse(path)):
            is_size = isinstance(node, ast.Subscript) and getattr(node.value, "attr", "") == "shape"
            if is_size or isinstance(node, ast.Compare):
                words = {part.value for part in ast.walk(node) if isinstance(part, ast.Constant)}
                assert words.isdisjoint(AXES), f"{path}:{node.lineno}"


def test_a_family_is_named_only_in_its_folder_and_in_the_table_of_families():
    folders = {path.name for path in (PACKAGE / "models").iterdir() if path.is_dir() and path.name != "__pycache__"}
    for name, path in MODULES.items():
        # Tables hold names of others: of tokenizer classes, of model types that compute what a known one does, and of forms of calls.
        if name in ("models.families", "data.token_files", "interop.other_types", "serve.tools"):
            continue
        # "llama3" is also what config files call a way to stretch positions.
        text = re.sub(r'configs/\w+|"llama3"', "", path.read_text().lower())
        own = name.split(".")[1] if name.startswith("models.") else ""
        assert not [family for family in folders - {own} if re.search(rf"\b_*{family}", text)], name


def test_the_inner_train_step_fits_one_screen():
    assert lines_of(functions(MODULES["zero.step"])["train_step"]) <= TRAIN_STEP


def test_rooms_below_the_trainer_name_no_settings():
    """Their errors name arguments, of which `trainer.setting_names` makes keys of a config. A translation's result is a config."""
    setting = re.compile(rf"\bconfig\.({'|'.join(place for place in settings.table() if '.' not in place)})\b")
    for name, path in MODULES.items():
        if name not in COMMAND_LINES and room_of(name) not in {"trainer", "commands", "migration"}:
            texts = [node.value for node in ast.walk(parse(path)) if isinstance(node, ast.Constant)]
            assert not [text for text in texts if isinstance(text, str) and setting.search(text)], name


def test_no_two_classes_have_one_name():
    names = [
        node.name
        for path in (*MODULES.values(), *KERNELS_FILES)
        for node in ast.walk(parse(path))
        if isinstance(node, ast.ClassDef)
    ]
    assert not {name for name in names if names.count(name) > 1}


def test_no_private_part_of_jax_is_used():
    private = "jax." + "_src"
    for folder in ("zerojax", "pallas_kernels", "configs", "examples", "scripts", "tests"):
        for path in (ROOT / folder).rglob("*.py"):
            assert private not in path.read_text(), path


def test_every_module_has_tests_of_its_name():
    names = [name.replace("__main__", "main").split(".") for name in MODULES]
    wanted = [pathlib.Path(*folders, f"test_{last}.py") for *folders, last in names]
    assert not [path for path in wanted if not (ROOT / "tests" / path).is_file()]


def test_the_first_paragraph_says_what_a_module_does():
    first = {name: (ast.get_docstring(parse(path)) or "").split("\n\n")[0] for name, path in MODULES.items()}
    assert not [name for name, paragraph in first.items() if "This module" not in paragraph]


def test_the_public_names_are_those_that_type_checkers_see():
    tree = parse(PACKAGE / "__init__.py")
    public = next(ast.literal_eval(node.value) for node in tree.body if isinstance(node, ast.Assign))
    for_checkers = next(node.body for node in tree.body if isinstance(node, ast.If))
    imported = {
        alias.asname: node.module for node in for_checkers if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert imported == public and list(public) == sorted(public) == zerojax.__all__
    assert all(hasattr(zerojax, name) for name in public) and set(public) <= set(dir(zerojax))
