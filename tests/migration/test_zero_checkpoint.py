"""Checks checkpoints of DeepSpeed, golden ones and ones cut here. This module tests zerojax.migration.zero_checkpoint."""

import hashlib
import io
import json
import math
import pathlib
import shutil
import zipfile

import ml_dtypes
import numpy as np
import pytest
import torch_writer
from torch_writer import Call

from zerojax.errors import UserError
from zerojax.migration import torch_files, zero_checkpoint

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "deepspeed"
EXPECTED = json.loads((GOLDEN / "expected.json").read_text())
KINDS = ("params", "exp_avg", "exp_avg_sq")
SHAPES = [{"embed.weight": (7, 3), "norm.weight": (5,)}, {"bias": (1,), "head.weight": (3, 4), "scale": (2,)}]


def digest(array):
    return hashlib.sha256(np.ascontiguousarray(array, np.float32).tobytes()).hexdigest()[:16]


@pytest.mark.parametrize("name", EXPECTED)
def test_a_golden_checkpoint_is_bit_for_bit_what_deepspeed_reports(name):
    found = zero_checkpoint.read(GOLDEN / name)
    for key, expected in EXPECTED[name].items():
        kind, weight = key.split("/", 1)
        array = (found.params if kind == "params" else found.moments[kind])[weight]
        if name.startswith("zero0"):  # it reports its bf16 weights, and stores float32 ones too
            array = array.astype(ml_dtypes.bfloat16)
        assert digest(array) == expected, key
    assert (found.step, found.skipped, found.updates, found.version) == (4, 0, 4, "0.19.8")
    assert found.config["optimizer"]["params"]["lr"] == 0.001 and len(found.trainable) == len(found.params) == 21
    assert found.moments.keys() == {"exp_avg", "exp_avg_sq"}
    scaler = found.loss_scaler
    assert scaler is None if "bf16" in name else (scaler["cur_scale"], scaler["cur_iter"]) == (512.0, 4)


def swapped(name, folder, *, forgets_names):
    """Copies a golden checkpoint with the files of both ranks swapped, and says whether any can be."""
    shutil.copytree(GOLDEN / name, folder)
    for pattern in ("*optim_states.pt", "*model_states.pt"):
        found = sorted((folder / "global_step4").glob(pattern))
        if len(found) == 2:
            contents = [path.read_bytes() for path in found]
            for path, content in zip(found, reversed(contents)):
                path.write_bytes(content)
                if forgets_names:
                    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(path, "w") as new:
                        for entry in old.namelist():
                            new.writestr(f"archive/{entry.partition('/')[2]}", old.read(entry))


@pytest.mark.parametrize("name", [name for name in EXPECTED if not name.startswith("zero0")])
def test_swapped_files_of_ranks_are_refused_by_the_names_inside(tmp_path, name):
    swapped(name, tmp_path / "step", forgets_names=False)
    with pytest.raises(
        UserError, match=r"zero_pp_rank_0_.*pt: was written as .*zero_pp_rank_1_.*pt: files of ranks were swapped"
    ):
        zero_checkpoint.read(tmp_path / "step")


@pytest.mark.parametrize("name", [name for name in EXPECTED if name.startswith(("zero1", "zero2"))])
def test_swapped_files_of_ranks_differ_from_the_copy_that_the_model_computes_with(tmp_path, name):
    swapped(name, tmp_path / "step", forgets_names=True)
    with pytest.raises(UserError, match=r"weight of the optimizer's files differs from the model's copy in \d+%"):
        zero_checkpoint.read(tmp_path / "step")


@pytest.mark.parametrize("name, value", [("global_steps", 2**31), ("skipped_steps", -1), ("global_steps", 10**30)])
def test_numbers_that_no_run_counts_are_refused(tmp_path, name, value):
    write_by_group(tmp_path / "step", truth(), 1)
    torch_writer.save(tmp_path / "step" / "mp_rank_00_model_states.pt", model_state(SHAPES, **{name: value}))
    with pytest.raises(UserError, match=rf"step: {name} is -?\d+, which no run counts"):
        zero_checkpoint.read(tmp_path / "step")


def truth(shapes=SHAPES):
    """Returns {kind: {name: array}}."""
    rng = np.random.default_rng(0)
    names = {name: shape for group in shapes for name, shape in group.items()}
    return {kind: {name: rng.normal(size=shape).astype(np.float32) for name, shape in names.items()} for kind in KINDS}


def model_state(shapes, **more):
    sizes = [{name: Call("torch.Size", shape) for name, shape in group.items()} for group in shapes]
    return {
        "module": {},
        "buffer_names": [],
        "param_shapes": sizes,
        "shared_params": {},
        "global_steps": 9,
        "skipped_steps": 2,
        "ds_config": {"train_batch_size": 8},
        "ds_version": "0.19.8",
        **more,
    }


def base_state(arrays):
    """Returns the optimizer's state of flat arrays: [{"exp_avg": ..., "exp_avg_sq": ...}, ...]."""
    groups = [{"lr": 0.1, "params": [number]} for number in range(len(arrays))]
    return {
        "state": {number: {"step": np.array(7), **one} for number, one in enumerate(arrays)},
        "param_groups": groups,
    }


def write_by_group(folder, arrays, ranks, shapes=SHAPES, *, tells_places=False, pads_weights=False, elastic=False):
    """Writes stages 1 and 2: each group flat, padded to a multiple of 2 * ranks, and cut."""
    folder.mkdir()
    torch_writer.save(folder / "mp_rank_00_model_states.pt", model_state(shapes))
    parts, places = {kind: [] for kind in KINDS}, []
    for group in shapes:
        align = 4 if pads_weights else 1
        starts, end = {}, 0
        for name, shape in group.items():
            starts[name], end = end, end + -(-math.prod(shape) // align) * align
        size = -(-end // (2 * ranks)) * 2 * ranks
        for kind in KINDS:
            flat = np.full(size, 1e9, np.float32)
            for name in group:
                flat[starts[name] : starts[name] + arrays[kind][name].size] = arrays[kind][name].ravel()
            parts[kind].append(np.split(flat, ranks))
        each, found = size // ranks, [{} for _ in range(ranks)]
        for name, shape in group.items():
            for rank in range(ranks):
                first = max(starts[name], rank * each)
                last = min(starts[name] + math.prod(shape), (rank + 1) * each)
                if first < last:
                    fields = {"numel": last - first, "start": first - rank * each}
                    found[rank][name] = Call("deepspeed.utils.tensor_fragment.fragment_address", state=fields)
        places.append(found)
    for rank in range(ranks):
        moments = [
            {**({"step": 7} if elastic else {}), **{kind: parts[kind][group][rank] for kind in KINDS[1:]}}
            for group in range(len(shapes))
        ]
        state = {
            "zero_stage": Call("deepspeed.runtime.zero.config.ZeroStageEnum", 2),
            "partition_count": [ranks] * len(shapes),
            "single_partition_of_fp32_groups": [parts["params"][group][rank] for group in range(len(shapes))],
            "base_optimizer_state": moments if elastic else base_state(moments),
        }
        if tells_places:
            state["param_slice_mappings"] = [found[rank] for found in places]
        torch_writer.save(folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt", {"optimizer_state_dict": state})


def write_by_weight(folder, arrays, ranks, shapes=SHAPES, *, cuts=1, **more):
    """Writes stage 3: each weight padded to a multiple of the ranks and cut; the result divided into `cuts` sub-groups."""
    folder.mkdir()
    flats = {kind: [[] for _ in range(ranks)] for kind in KINDS}
    for group in shapes:
        for name, shape in group.items():
            each = -(-math.prod(shape) // ranks)
            for kind in KINDS:
                padded = np.full(each * ranks, 1e9, np.float32)
                padded[: math.prod(shape)] = arrays[kind][name].ravel()
                for rank, part in enumerate(np.split(padded, ranks)):
                    flats[kind][rank].append(part)
    for rank in range(ranks):
        cut = {kind: np.array_split(np.concatenate(flats[kind][rank]), cuts) for kind in KINDS}
        state = {
            "zero_stage": Call("deepspeed.runtime.zero.config.ZeroStageEnum", 3),
            "partition_count": ranks,
            "fp32_flat_groups": cut["params"],
            "optimizer_state_dict": base_state([{kind: cut[kind][n] for kind in KINDS[1:]} for n in range(cuts)]),
        }
        torch_writer.save(
            folder / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt", {"optimizer_state_dict": state}
        )
        own = {name: value(rank) if callable(value) else value for name, value in more.items()}
        torch_writer.save(folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt", model_state(shapes, **own))


def assert_same(found, arrays):
    for kind in KINDS:
        own = found.params if kind == "params" else found.moments[kind]
        for name, array in arrays[kind].items():
            np.testing.assert_array_equal(own[name], array, err_msg=f"{kind} {name}")


WAYS = {
    "plain": {},
    "with places": {"tells_places": True},
    "padded weights": {"tells_places": True, "pads_weights": True},
    "elastic": {"elastic": True},
}


@pytest.mark.parametrize("ranks", [1, 3, 4])
@pytest.mark.parametrize("way", WAYS)
def test_flat_groups_of_any_number_of_ranks_are_put_together(tmp_path, ranks, way):
    arrays = truth()
    write_by_group(tmp_path / "step", arrays, ranks, **WAYS[way])
    found = zero_checkpoint.read(tmp_path / "step")
    assert_same(found, arrays)
    assert (found.step, found.skipped, found.updates, found.ranks) == (9, 2, 7, ranks)


@pytest.mark.parametrize("ranks", [1, 2, 5, 12])
@pytest.mark.parametrize("cuts", [1, 3])
def test_weights_cut_among_any_number_of_ranks_are_put_together(tmp_path, ranks, cuts):
    arrays = truth()
    write_by_weight(tmp_path / "step", arrays, ranks, cuts=cuts)
    assert_same(zero_checkpoint.read(tmp_path / "step"), arrays)


def test_frozen_weights_buffers_and_tied_weights_come_along(tmp_path):
    arrays, frozen = truth(), np.arange(10, dtype=np.float32).astype(ml_dtypes.bfloat16)
    parts = np.split(np.concatenate([frozen, frozen[:2]]), 3)
    write_by_weight(
        tmp_path / "step",
        arrays,
        3,
        frozen_param_shapes={"base.weight": Call("torch.Size", (2, 5))},
        frozen_param_fragments=lambda rank: {"base.weight": parts[rank]},
        buffer_names=["steps"],
        module={"steps": np.array([4])},
        shared_params={"lm_head.weight": "embed.weight"},
    )
    found = zero_checkpoint.read(tmp_path / "step")
    np.testing.assert_array_equal(found.params["base.weight"], frozen.reshape(2, 5))
    assert found.params["steps"] == [4] and found.copies == {"lm_head.weight": "embed.weight"}
    assert set(found.trainable) == {name for group in SHAPES for name in group}


def test_stage_0_groups_are_found_by_what_transformers_trainer_decays_and_by_dims():
    weights = {
        "decoder.SelfAttention.relative_attention_bias.weight": np.ones((4, 2)),  # spared, of two dims
        "h.0.ln_1.weight": np.ones(5),
        "h.0.self_attn.sinks": np.ones(3),  # decays, of one dim
        "h.0.mlp.experts.down_proj_bias": np.ones((2, 7)),
        "h.0.mlp.c_fc.weight": np.ones((3, 11)),
    }
    bias, norm, sinks, experts, matrix = weights
    for groups in ([[sinks, matrix], [bias, norm, experts]], [[bias, experts, matrix], [norm, sinks]]):
        for told in (groups, groups[::-1]):
            sizes = [sum(weights[name].size for name in group) for group in told]
            assert zero_checkpoint._groups_of(pathlib.Path("step"), weights, sizes) == told
    with pytest.raises(UserError, match=r"^step: stage 0 stores 2 groups of weights without their names"):
        zero_checkpoint._groups_of(pathlib.Path("step"), weights, [1, 2])


@pytest.mark.parametrize("groups", [1, 2])
def test_stage_0_in_16_bits_has_flat_groups_without_names(tmp_path, groups):
    arrays = truth()
    names = {name: shape for group in SHAPES for name, shape in group.items()}
    matrices = [name for name, shape in names.items() if len(shape) >= 2]
    divided = [list(names)] if groups == 1 else [matrices, [name for name in names if name not in matrices]]
    flat = {
        kind: [np.concatenate([arrays[kind][name].ravel() for name in group]) for group in divided] for kind in KINDS
    }
    inner = base_state([{kind: flat[kind][n] for kind in KINDS[1:]} for n in range(groups)])
    optimizer = {"optimizer_state_dict": inner, "fp32_groups_flat": flat["params"], "cur_scale": 64.0, "cur_iter": 3}
    module = {name: array.astype(np.float16) for name, array in arrays["params"].items()}
    torch_writer.save(
        tmp_path / "mp_rank_00_model_states.pt", model_state([], module=module, optimizer=optimizer, param_shapes=None)
    )
    found = zero_checkpoint.read(tmp_path)
    assert_same(found, arrays)
    assert found.loss_scaler["cur_scale"] == 64.0


def test_stage_0_in_float32_keeps_the_optimizers_own_state(tmp_path):
    arrays = truth()
    names = list(arrays["params"])
    state = {
        n: {"step": np.array(7), **{kind: arrays[kind][name] for kind in KINDS[1:]}} for n, name in enumerate(names)
    }
    optimizer = {"state": state, "param_groups": [{"params": list(range(len(names)))}]}
    content = model_state([], module=arrays["params"], optimizer=optimizer, param_shapes=None)
    torch_writer.save(tmp_path / "mp_rank_00_model_states.pt", content)
    assert_same(zero_checkpoint.read(tmp_path), arrays)


def write_universal(path, arrays):
    for name in arrays["params"]:
        weight = path / "global_step9_universal" / "zero" / name
        weight.mkdir(parents=True)
        for file, kind in (("fp32", "params"), ("exp_avg", "exp_avg"), ("exp_avg_sq", "exp_avg_sq")):
            torch_writer.save(weight / f"{file}.pt", {"param": arrays[kind][name]})
        torch_writer.save(weight / "step.pt", np.array(7))
    (path / "latest_universal").write_text("global_step9_universal\n")


def test_a_universal_checkpoint_has_a_folder_for_each_weight(tmp_path):
    arrays = truth()
    write_universal(tmp_path, arrays)
    found = zero_checkpoint.read(tmp_path)
    assert_same(found, arrays)
    assert (found.step, found.updates) == (7, 7)


@pytest.mark.parametrize("file", ["fp32", "exp_avg", "exp_avg_sq"])
def test_a_weight_of_a_universal_checkpoint_that_lacks_a_file_is_refused(tmp_path, file):
    write_universal(tmp_path, truth())
    (tmp_path / "global_step9_universal" / "zero" / "bias" / f"{file}.pt").unlink()
    with pytest.raises(
        UserError, match=rf"zero/bias: holds no {file}.pt, and \S+ has one; convert the checkpoint again"
    ):
        zero_checkpoint.read(tmp_path)


def test_weights_of_a_universal_checkpoint_are_of_one_step(tmp_path):
    write_universal(tmp_path, truth())
    torch_writer.save(tmp_path / "global_step9_universal" / "zero" / "bias" / "step.pt", np.array(6))
    with pytest.raises(UserError, match=r"zero: bias is of update 6, and \S+ of 7: files of two steps were mixed"):
        zero_checkpoint.read(tmp_path)


def changed(path, *keys, value):
    """Writes a file of torch again with one value changed."""
    content = torch_files.read(path)
    inner = content
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = value
    torch_writer.save(path, content)


COUNT = ("optimizer_state_dict", "base_optimizer_state", "state", 0, "step")


def test_files_of_two_steps_are_refused_by_their_counts(tmp_path):
    write_by_group(tmp_path / "flat", truth(), 2, tells_places=False)
    for rank in range(2):
        changed(tmp_path / "flat" / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt", *COUNT, value=6)
    with pytest.raises(UserError, match=r"counts 6 updates, and mp_rank_00_model_states.pt 7 .*files of two steps"):
        zero_checkpoint.read(tmp_path / "flat")
    changed(tmp_path / "flat" / "mp_rank_00_model_states.pt", "global_steps", value=7)
    with pytest.raises(UserError, match=r"counts 6 updates, and mp_rank_00_model_states.pt 5 "):
        zero_checkpoint.read(tmp_path / "flat")
    changed(tmp_path / "flat" / "mp_rank_00_model_states.pt", "ds_version", value="0.9.5")  # counts its initialization
    assert_same(zero_checkpoint.read(tmp_path / "flat"), truth())
    changed(tmp_path / "flat" / "zero_pp_rank_1_mp_rank_00_optim_states.pt", *COUNT, value=7)
    with pytest.raises(UserError, match=r"rank_1.*step of the optimizer is 7, and zero_pp_rank_0.* has 6: .*two saves"):
        zero_checkpoint.read(tmp_path / "flat")


def test_files_of_two_saves_are_refused_where_weights_are_cut_among_ranks(tmp_path):
    write_by_weight(tmp_path / "cut", truth(), 2)
    changed(tmp_path / "cut" / "zero_pp_rank_1_mp_rank_00_model_states.pt", "global_steps", value=8)
    with pytest.raises(
        UserError, match=r"rank_1.*global_steps is 8, and zero_pp_rank_0.* has 9: they are of two saves"
    ):
        zero_checkpoint.read(tmp_path / "cut")


def test_a_file_of_another_number_of_ranks_is_refused(tmp_path):
    write_by_group(tmp_path / "two", truth(), 2)
    write_by_group(tmp_path / "three", truth(), 3)
    name = "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    shutil.copy(tmp_path / "three" / name, tmp_path / "two" / name)
    with pytest.raises(UserError, match=r"rank_1.*partition_count is \[3, 3\], and zero_pp_rank_0.* has \[2, 2\]"):
        zero_checkpoint.read(tmp_path / "two")


@pytest.mark.parametrize("name", ["zero1-fp16-world2", "zero2-bf16-world2", "zero3-bf16-world2"])
def test_a_checkpoint_of_zero_without_its_optimizers_files_is_no_checkpoint_of_stage_0(tmp_path, name):
    folder = copy(tmp_path, name)
    for path in folder.rglob("*_optim_states.pt"):
        path.unlink()
    with pytest.raises(UserError, match=r"holds no \*_optim_states.pt, where ZeRO \d keeps the float32 weights"):
        zero_checkpoint.read(folder)


@pytest.mark.parametrize("prefix", ["bf16_", "fp16_"])
def test_two_checkpoints_in_one_folder_are_refused(tmp_path, prefix):
    write_by_group(tmp_path / "at", truth(), 1)
    name = "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    shutil.copy(tmp_path / "at" / name, tmp_path / "at" / f"{prefix}{name}")
    with pytest.raises(UserError, match=r"is of the same rank as .*, so two checkpoints lie in one folder"):
        zero_checkpoint.read(tmp_path / "at")


def copy(tmp_path, name="zero3-bf16-world2"):
    return pathlib.Path(shutil.copytree(GOLDEN / name, tmp_path / name))


def test_what_is_missing_or_cut_otherwise_is_one_line(tmp_path):
    folder = copy(tmp_path)
    step = folder / "global_step4"
    (step / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(UserError, match=r"holds the optimizer state of 1 of 2 ranks"):
        zero_checkpoint.read(folder)
    (step / "layer_00-model_states.pt").touch()
    with pytest.raises(UserError, match=r"layer_00.* belongs to pipeline or expert parallelism"):
        zero_checkpoint.read(folder)
    (folder / "latest").write_text("global_step5")
    with pytest.raises(UserError, match=r"latest: names global_step5, which is not there"):
        zero_checkpoint.read(folder)
    (folder / "latest").write_text("../..")
    with pytest.raises(UserError, match=r"must hold the name of a folder beside it"):
        zero_checkpoint.read(folder)
    with pytest.raises(UserError, match=r"holds no checkpoint of DeepSpeed"):
        zero_checkpoint.read(tmp_path)
    with pytest.raises(UserError, match=r"is not a folder"):
        zero_checkpoint.read(tmp_path / "nowhere")
    shutil.copy(step / "zero_pp_rank_0_mp_rank_00_model_states.pt", tmp_path / "mp_rank_01_model_states.pt")
    with pytest.raises(UserError, match=r"mp_rank_01.* cut by tensor parallelism"):
        zero_checkpoint.read(tmp_path)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_missing_model_state_is_told(tmp_path, rank):
    folder = copy(tmp_path)
    next(folder.rglob(f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")).unlink()
    with pytest.raises(UserError, match="holds the model state of 1 of 2 ranks; copy the others beside it"):
        zero_checkpoint.read(folder)


def test_a_file_that_holds_no_table_is_one_line(tmp_path):
    write_by_weight(tmp_path / "at", truth(), 2)
    path = next((tmp_path / "at").rglob("zero_pp_rank_0_mp_rank_00_model_states.pt"))
    torch_writer.save(path, [1, 2])
    with pytest.raises(UserError, match=rf"^{path}: does not hold what DeepSpeed saves; copy it again$"):
        zero_checkpoint.read(tmp_path / "at")


@pytest.mark.parametrize("value", [None, 3, "x", [None], {"a": {}}, 2**70])
@pytest.mark.parametrize("name", ["param_shapes", "global_steps", "ds_config", "shared_params", "module"])
def test_values_of_another_kind_are_one_line_or_do_not_matter(tmp_path, name, value):
    folder = tmp_path / "at"
    write_by_weight(folder, truth(), 2)
    path = next(folder.rglob("zero_pp_rank_0_mp_rank_00_model_states.pt"))
    torch_writer.save(path, {**torch_files.read(path), name: value})
    try:
        assert_same(zero_checkpoint.read(folder), truth())
    except UserError as error:
        assert "\n" not in str(error)
