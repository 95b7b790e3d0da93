"""Checks names on the Hugging Face hub, with a cache made here and no network. This module tests zerojax.interop.hub."""

import os
import pathlib
import shutil

import huggingface_hub
import huggingface_hub.constants
import pytest
import runs

from zerojax import errors
from zerojax.interop import folder as folder_lib
from zerojax.interop import hub, peft
from zerojax.trainer import command

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "huggingface"
NAME, ABSENT = "org/tiny-bart", "org/not-there"


@pytest.fixture(autouse=True)
def cached(tmp_path, monkeypatch):
    """Makes a cache that holds one model, and returns its folder. Nothing is downloaded."""

    def download(name, *, local_files_only=False, **_):
        raise NotADirectoryError(f"no network\nfor {name}")

    original = huggingface_hub.snapshot_download
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(
        huggingface_hub,
        "snapshot_download",
        lambda name, **how: original(name, **how) if how.get("local_files_only") else download(name, **how),
    )
    repository = tmp_path / "cache" / "models--org--tiny-bart"
    found = repository / "snapshots" / ("a" * 40)
    shutil.copytree(GOLDEN / "bart", found)
    shutil.copy(runs.ROOT / "configs" / "short_reviews" / "tokenizer.json", found / "tokenizer.json")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    return found


def test_a_name_means_its_folder_in_the_cache_and_a_path_means_itself(cached, tmp_path, monkeypatch):
    assert hub.folder(NAME) == hub.fetched(NAME) == str(cached) and hub.name_of(cached) == NAME
    monkeypatch.chdir(tmp_path)
    for path in (str(GOLDEN), "", "runs/a/export", "../org/tiny-bart", "one"):
        assert hub.folder(path) == hub.fetched(path) == path and hub.name_of(path) == os.path.abspath(path)
    (tmp_path / "org" / "tiny-bart").mkdir(parents=True)
    assert hub.folder(NAME) == hub.fetched(NAME) == NAME  # a folder hides a name


def test_a_model_and_an_adapter_are_opened_by_name(cached):
    opened = folder_lib.open_folder(NAME)
    assert opened.path == cached
    shutil.copytree(GOLDEN / "bart" / "lora", cached, dirs_exist_ok=True)
    assert peft.open_adapter(NAME, opened.family, opened.model).path == cached


def test_a_run_takes_the_model_and_its_tokenizer_by_name_and_keeps_the_name(cached):
    found = runs.config(init_from=NAME)
    assert (found.init_from, found.data.tokenizer) == (NAME, str(cached / "tokenizer.json"))


def test_a_model_that_cannot_be_had_is_told_in_one_line_with_the_command_that_downloads_it(capsys, monkeypatch):
    with pytest.raises(errors.UserError) as caught:
        command._fetch(ABSENT)
    line = str(caught.value)
    assert line.startswith(f"config.init_from: {ABSENT}: is not a folder") and "\n" not in line
    assert "(NotADirectoryError: no network)" in line and f"hf download {ABSENT}" in line
    assert capsys.readouterr().err == f"zerojax: downloading {ABSENT} from the Hugging Face hub\n"
    monkeypatch.setattr(hub, "is_installed", lambda: False)
    with pytest.raises(
        errors.UserError, match=r'pip install "zerojax\[hub\]", or, with a network: hf download org/not-there'
    ):
        hub.fetched(ABSENT)
    assert hub.folder(ABSENT) == ABSENT


@pytest.mark.parametrize(
    ("group", "token", "words"),
    {
        "no export": ({"export__push_to": "me/mine"}, "t", r"nothing is exported; set --config.export.format=huggingface"),
        "no name": ({"export__push_to": "mine", "export__format": "huggingface"}, "t", r"must be a name on .* user/model, and is 'mine'"),
        "offline": ({"export__push_to": "me/mine", "export__format": "huggingface"}, "offline", "HF_HUB_OFFLINE keeps .*; unset it"),
        "nobody": ({"export__push_to": "me/mine", "export__format": "huggingface"}, None, "nobody is logged in .* hf auth login"),
    }.values(),
)  # fmt: skip
def test_an_export_that_could_not_be_written_to_the_hub_is_refused_before_the_run(monkeypatch, group, token, words):
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: token)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", token == "offline")
    with pytest.raises(errors.UserError, match=rf"^config\.export\.push_to: .*{words}"):
        runs.config(**group)


class Api:
    """What the hub's client is asked, with the repositories that exist."""

    there: tuple[str, ...] = ()
    asked: list = []  # noqa: RUF012
    fails = False

    def repo_exists(self, name):
        return name in self.there

    def create_repo(self, name, *, private):
        self.asked.append(("create", name, private))

    def upload_folder(self, *, repo_id, folder_path, commit_message):
        if self.fails:
            raise OSError("the hub is away")
        self.asked.append(("upload", repo_id, folder_path))


def test_an_export_is_written_and_a_new_model_is_private(monkeypatch, tmp_path):
    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    monkeypatch.setattr(Api, "asked", [])
    hub.push(tmp_path, "me/new")
    monkeypatch.setattr(Api, "there", ("me/old",))
    hub.push(tmp_path, "me/old")
    upload = [("upload", name, str(tmp_path)) for name in ("me/new", "me/old")]
    assert Api.asked == [("create", "me/new", True), *upload]
    monkeypatch.setattr(Api, "fails", True)
    with pytest.raises(
        errors.UserError,
        match=rf"'me/old' could not be written \(OSError: the hub is away\); later: hf upload me/old {tmp_path}$",
    ):
        hub.push(tmp_path, "me/old")
