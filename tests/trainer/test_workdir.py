"""Checks that a folder belongs to one run. This module tests zerojax.trainer.workdir."""

import json
import os
import pathlib
import runpy
import time

import file_systems
import pytest
import step_folders

from zerojax.errors import UserError
from zerojax.trainer import config as config_lib
from zerojax.trainer import workdir

BASE = pathlib.Path(__file__).parents[2] / "configs" / "base.py"


def settings(**changes) -> dict:
    """Returns the base settings, {"zero.stage": 2} style changes applied."""
    found = config_lib.to_dict(config_lib.from_dict(runpy.run_path(str(BASE))["get_config"]()))
    for place, value in changes.items():
        *groups, name = place.split(".")
        group = found
        for part in groups:
            group = group[part]
        group[name] = value
    return found


def test_a_new_folder_is_made_and_takes_any_config(tmp_path):
    workdir.check(tmp_path / "a" / "b", settings())
    assert (tmp_path / "a" / "b").is_dir()


@pytest.mark.parametrize("kept", ["", "file", "empty"])
def test_a_run_that_is_refused_leaves_no_folder_that_it_made_and_each_that_was_there(tmp_path, kept):
    before = tmp_path / "runs" / "mine" / kept if kept else tmp_path
    if kept == "file":
        before = before / "data"
        before.parent.mkdir(parents=True)
        before.write_text("mine")
    before.exists() or before.mkdir(parents=True)
    found = sorted(tmp_path.rglob("*"))
    with pytest.raises(UserError), workdir.held(tmp_path / "runs" / "mine"):
        (tmp_path / "runs" / "mine" / "checkpoints").mkdir()
        (tmp_path / "runs" / "mine" / "datasets" / "a").mkdir(parents=True)
        raise UserError("config.steps: is refused")
    assert sorted(tmp_path.rglob("*")) == found


def test_a_run_that_fails_after_its_first_state_keeps_its_folder(tmp_path):
    with pytest.raises(UserError), workdir.held(tmp_path / "run"):
        (tmp_path / "run" / "checkpoints").mkdir()
        workdir.save(tmp_path / "run", settings())
        raise UserError("the loss is not finite")
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["checkpoints", workdir.CONFIG_FILE]


def test_the_saved_config_is_the_resolved_one(tmp_path):
    workdir.save(tmp_path, settings(steps=7))
    assert json.loads((tmp_path / workdir.CONFIG_FILE).read_text()) == json.loads(json.dumps(settings(steps=7)))
    assert [path.name for path in tmp_path.iterdir()] == [workdir.CONFIG_FILE]


@pytest.mark.parametrize("change", [{"steps": 500}, {"zero.stage": 1}, {"mesh.data": 4}, {"precision": "fp32"}])
def test_settings_of_where_and_how_to_compute_may_change(tmp_path, change):
    workdir.save(tmp_path, settings())
    workdir.check(tmp_path, settings(**change))


@pytest.mark.parametrize("place", ["optimizer.momentum", "data.labels", "grpo.group", "grpo.clip", "lora.dora"])
def test_a_run_that_lacks_a_setting_had_its_default_or_what_there_was_before(tmp_path, place):
    before, (group, name) = settings(), place.split(".")
    del before[group][name]
    workdir.save(tmp_path, before)
    workdir.check(tmp_path, settings())
    changed = {"optimizer.momentum": 0.5, "data.labels": ("a",), "grpo.group": 4, "grpo.clip": 0.1, "lora.dora": True}
    with pytest.raises(UserError, match=rf"config\.{place}=(?!None)"):
        workdir.check(tmp_path, settings(**{place: changed[place]}))
    workdir.check(tmp_path, settings(**{"grpo.clip": 0.2} if place == "grpo.clip" else {}))


@pytest.mark.parametrize("change", [{"seed": 1}, {"model.num_layers": 9}, {"optimizer.b1": 0.5}, {"seq_len": 64}])
def test_settings_of_what_is_computed_may_not_change_and_the_line_names_both_values(tmp_path, change):
    workdir.save(tmp_path, settings())
    ((place, value),) = change.items()
    with pytest.raises(UserError, match=rf"config\.{place}=.*, and this run has {value}; use the same") as caught:
        workdir.check(tmp_path, settings(**change))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("before, now", [(0, 4), (4, 0), (0, 0)])
def test_a_batch_that_is_derived_is_compared_where_it_is_known(tmp_path, before, now):
    workdir.save(tmp_path, settings(global_batch_size=before))
    workdir.check(tmp_path, settings(global_batch_size=now))


def test_the_line_names_another_model_and_not_the_tokenizer_that_came_with_it(tmp_path):
    one, other = ({"init_from": name, "data.tokenizer": f"{name}/tokenizer.json"} for name in ("one", "other"))
    workdir.save(tmp_path, settings(**one))
    with pytest.raises(UserError, match=r"was started with config\.init_from='one', and this run has 'other'"):
        workdir.check(tmp_path, settings(**other))


def test_a_free_name_frees_no_other_that_begins_like_it(tmp_path):
    workdir.save(tmp_path, {"mesh": {"data": 1}, "meshes": 1})
    with pytest.raises(UserError, match=r"config\.meshes"):
        workdir.check(tmp_path, {"mesh": {"data": 2}, "meshes": 2})


def test_a_setting_that_there_is_no_more_is_told_so(tmp_path):
    before = settings()
    before["data"]["gone"] = "x"
    workdir.save(tmp_path, before)
    with pytest.raises(
        UserError, match=r"config\.data\.gone='x', which is no setting of this version; resume with"
    ) as caught:
        workdir.check(tmp_path, settings())
    assert "\n" not in str(caught.value)


def test_every_free_name_is_a_setting():
    fields = settings()
    for place in workdir.FREE:
        group = fields
        for part in place.split("."):
            group = group[part]


@pytest.mark.parametrize("text", ["{", "", "[]", "3", "\udcff"])
def test_a_config_that_is_not_a_saved_one_is_refused(tmp_path, text):
    (tmp_path / workdir.CONFIG_FILE).write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(UserError, match=r"config\.json: is not"):
        workdir.check(tmp_path, settings())


def test_another_programs_config_is_refused(tmp_path):
    (tmp_path / workdir.CONFIG_FILE).write_text(json.dumps({"architectures": ["X"]}))
    with pytest.raises(UserError, match=r"config\.architectures"):
        workdir.check(tmp_path, settings())


def test_a_file_in_the_folders_place_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(UserError, match="cannot be used"):
            workdir.check(place, settings())
    for name in (workdir.CONFIG_FILE, "metrics.jsonl", "run.json"):
        (tmp_path / name).mkdir()
        with pytest.raises(UserError, match=rf"cannot be used \(Is a directory, {name}\)"):
            workdir.check(tmp_path, settings())


def test_a_name_under_which_checkpoints_would_be_lost_is_refused_at_the_start(tmp_path):
    with pytest.raises(UserError, match=r"holds \\, and checkpoints under such a name would be lost"):
        workdir.check(tmp_path / "run\\1", settings())
    assert not list(tmp_path.iterdir())


def test_files_that_are_gone_beside_checkpoints_are_named(tmp_path):
    assert workdir.lost(tmp_path / "absent") == []
    (tmp_path / workdir.CHECKPOINTS).mkdir()
    assert workdir.lost(tmp_path) == []
    step_folders.write_step(tmp_path / workdir.CHECKPOINTS, 3)
    config, log = workdir.lost(tmp_path)
    assert config.startswith(f"{tmp_path}/config.json: is missing beside checkpoints")
    assert "metrics up to the checkpoint are lost" in log
    workdir.save(tmp_path, settings())
    assert workdir.lost(tmp_path) == [log]


def test_a_folder_is_held_by_one_run_and_free_after_it(tmp_path):
    folder = tmp_path / "a" / "run"
    for _ in range(2):
        with workdir.held(folder):
            before = (folder / workdir.LOCK_FILE).read_bytes()
            with pytest.raises(UserError, match=rf"^--workdir {folder}: process {os.getpid()} on .* or choose another"):
                workdir.held(folder).__enter__()
            assert (folder / workdir.LOCK_FILE).read_bytes() == before
        assert not list(folder.iterdir())


@pytest.mark.parametrize("name", ["config.json", "metrics.jsonl.new", "checkpoints", "export/model.safetensors"])
def test_a_symbolic_link_in_the_folder_is_refused_and_not_written_through(tmp_path, name):
    (tmp_path / "run" / "export").mkdir(parents=True)
    (tmp_path / "run" / name).symlink_to(tmp_path / "theirs")
    for enter in (lambda folder: workdir.check(folder, settings()), lambda folder: workdir.held(folder).__enter__()):
        with pytest.raises(UserError, match=rf"{name}: is a symbolic link; a run writes only into its own folder"):
            enter(tmp_path / "run")
    assert not (tmp_path / "theirs").exists() and not (tmp_path / "run" / workdir.LOCK_FILE).exists()


def test_a_link_to_the_folder_itself_and_hidden_links_are_fine(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "run")
    (tmp_path / "run" / ".#config.json").symlink_to("me@host")
    workdir.check(tmp_path / "link", settings())


def test_a_save_that_fails_keeps_the_old_config(tmp_path, monkeypatch):
    workdir.save(tmp_path, settings(steps=1))
    monkeypatch.setattr(os, "replace", file_systems.full)
    with pytest.raises(UserError, match="cannot be written \\(No space left on device\\)"):
        workdir.save(tmp_path, settings(steps=2))
    assert json.loads((tmp_path / workdir.CONFIG_FILE).read_text())["steps"] == 1


def test_the_date_of_a_run_is_that_of_its_first_start(tmp_path):
    before = int(time.time())
    first = workdir.began(tmp_path)
    assert before <= first <= time.time()
    workdir.save_began(tmp_path, 5)
    workdir.save_began(tmp_path, 6)
    assert workdir.began(tmp_path) == 5
    (tmp_path / "began.txt").write_text("x")
    with pytest.raises(UserError, match=r"began.txt: holds no time"):
        workdir.began(tmp_path)


def test_a_folder_says_whether_its_run_knew_a_setting(tmp_path):
    assert not workdir.is_older(tmp_path, "data.sources")
    for saved, expected in (({"data": {"name": "x"}}, True), ({"data": {"sources": []}}, False), ("damaged", False)):
        (tmp_path / workdir.CONFIG_FILE).write_text(json.dumps(saved) if isinstance(saved, dict) else saved)
        assert workdir.is_older(tmp_path, "data.sources") == expected
