"""Checks a run against the free bytes of its disks. This module tests zerojax.trainer.checks.disk_space."""

import collections

import pytest
import runs

from zerojax import train, tree
from zerojax.errors import UserError
from zerojax.trainer import program, workdir
from zerojax.trainer.checks import disk_space
from zerojax.zero.host import storage

FREE = collections.namedtuple("FREE", "free")


def built(**changes):
    return program.build(runs.config(**changes), tokenizer_vocab=320)


def needed(monkeypatch, found, folder, **how):
    """Returns the least free bytes with which a run is not refused."""

    def fits(free):
        monkeypatch.setattr(disk_space.shutil, "disk_usage", lambda _: FREE(free))
        try:
            disk_space.check(found, folder, **{"step": 0, "saved": 0, **how})
        except UserError as error:
            assert "\n" not in str(error)
            return False
        return True

    least, most = -1, 1 << 40
    while most - least > 1:
        middle = (least + most) // 2
        least, most = (least, middle) if fits(middle) else (middle, most)
    return most


@pytest.mark.parametrize(
    "steps, every, at_end, keep_last", [(6, 0, True, 2), (6, 2, True, 2), (6, 2, False, 1), (9, 1, True, 3)]
)
@pytest.mark.parametrize("step, saved", [(0, 0), (4, 2), (6, 1)])
def test_the_checkpoints_are_those_that_the_folder_holds_at_once(steps, every, at_end, keep_last, step, saved):
    config = runs.config(
        steps=steps, checkpoint__every=every, checkpoint__at_end=at_end, checkpoint__keep_last=keep_last
    )
    held = most = saved
    for now in range(step + 1, steps + 1):
        if at_end if now == steps else every and now % every == 0:
            most, held = max(most, held + 1), min(held + 1, keep_last)
    assert disk_space.most_saved(config, step, saved) == most - saved


@pytest.mark.parametrize("every, counted", [(2, 3), (0, 2)])
def test_the_best_checkpoints_have_room_beside_the_newest_where_there_are_losses(every, counted):
    changes = {"checkpoint__every": 2, "checkpoint__keep_last": 1, "checkpoint__keep_best": 1, "evaluate__every": every}
    assert disk_space.most_saved(runs.config(steps=9, **runs.EVALUATED | changes), 0, 0) == counted


def test_a_disk_needs_room_for_checkpoints_export_and_offloaded_state_together(monkeypatch, tmp_path):
    whole, plain = built(), built(checkpoint__at_end=False, checkpoint__every=0)
    state = sum(tree.nbytes(leaf) for _, leaf in tree.flatten(whole.logical_abstract_state))
    weights = sum(tree.size(leaf) for _, leaf in tree.flatten(whole.partition.abstract_state.params))
    assert needed(monkeypatch, whole, tmp_path) == pytest.approx(disk_space._COMPRESSED * state, abs=1)
    assert needed(monkeypatch, whole, tmp_path, step=6) == needed(monkeypatch, plain, tmp_path) == 0
    for changes, size in (
        ({"export__format": "huggingface"}, 2),
        ({"export__format": "huggingface", "export__dtype": "fp32"}, 4),
    ):
        assert needed(monkeypatch, built(**changes), tmp_path, step=6) == size * weights
    how = {
        "offload__optimizer": "nvme",
        "offload__nvme_path": str(tmp_path / "a" / "b"),
        "export__format": "huggingface",
    }
    found = built(**how)
    held = storage.disk_bytes(found.partition)
    assert held > 0
    every = disk_space._COMPRESSED * state + 2 * weights + held
    assert needed(monkeypatch, found, tmp_path / "x" / "y") == pytest.approx(every, abs=1)


def test_an_adapters_run_writes_adapters_alone(monkeypatch, tmp_path):
    found = built(
        lora__r=4,
        export__format="peft",
        checkpoint__at_end=False,
        checkpoint__every=0,
        lora__target_modules="all-linear",
    )
    trained = [leaf for leaf in found.partition.placements.values() if leaf.trainable]
    assert needed(monkeypatch, found, tmp_path) == 4 * sum(tree.size(leaf) for leaf in trained) > 0


def test_a_folder_that_this_user_cannot_write_is_refused_before_it_compiles(monkeypatch, tmp_path):
    found = built(offload__optimizer="nvme", offload__nvme_path=str(tmp_path / "disk" / "x"))
    monkeypatch.setattr(disk_space.os, "access", lambda path, _: path != tmp_path)
    with pytest.raises(
        UserError, match=f"^{tmp_path}/disk/x: {tmp_path} is not writable for this user; give write access or"
    ):
        disk_space.check(found, tmp_path.parent, step=0, saved=0)


def test_a_run_without_room_ends_in_one_line_before_it_compiles_and_leaves_no_folder(monkeypatch, tmp_path):
    monkeypatch.setattr(disk_space.shutil, "disk_usage", lambda _: FREE(1000))
    monkeypatch.setattr(train, "_compile", None)
    with pytest.raises(UserError) as refused, workdir.held(tmp_path / "run"):
        train.train(runs.config(export__format="huggingface", checkpoint__every=2), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    line = str(refused.value)
    assert line.startswith(f"{tmp_path / 'run'}: 3 checkpoints and the export take at least ") and "\n" not in line
    assert (
        "its disk has 1000 B free; free some, choose another --workdir or lower config.checkpoint.keep_last or set"
        in line
    )
