"""Checks the files that start runs under Slurm, Kubernetes and Ray, with stand-ins for their commands. This module tests scripts/."""

import importlib.util
import json
import os
import pathlib
import signal
import subprocess
import time

import pytest
import yaml

from zerojax.trainer.card import document

ROOT = pathlib.Path(__file__).parents[2]
LIMIT = 60  # seconds; a script that takes longer hangs
PYTHON = """#!/bin/bash
printf '%s\\n' "$*" > "$WORKDIR/arguments"
trap 'cp "$WORKDIR/card" "$WORKDIR/run.json"; exit 0' TERM
touch "$WORKDIR/started"
if [ -n "$HANGS" ]; then while true; do sleep 0.05; done; fi
cp "$WORKDIR/card" "$WORKDIR/run.json"
exit ${STATUS:-0}
"""


@pytest.fixture
def stand_ins(tmp_path):
    """Returns an environment whose commands are stand-ins that keep their arguments, and the folder of the run."""
    commands, run = tmp_path / "bin", tmp_path / "run"
    for folder in (commands, run):
        folder.mkdir()
    texts = {"python": PYTHON, "srun": '#!/bin/bash\nwhile [[ "$1" == --* ]]; do shift; done\nexec "$@"\n'}
    texts["scontrol"] = '#!/bin/bash\necho "$@" > "$WORKDIR/requeued"\n'
    for name, text in texts.items():
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    path = f"{commands}{os.pathsep}{os.environ['PATH']}"
    return {
        "PATH": path,
        "WORKDIR": str(run),
        "CONFIG": "configs/zero3.py",
        "ARGS": "--config.steps=3 --config.seed=1",
    }, run


def card(run, status):
    (run / "card").write_text(document.text({"schema": 1, "status": status, "parts": [{"status": "stopped"}]}))


def manifest():
    return yaml.safe_load((ROOT / "scripts" / "jobset.yaml").read_text())


@pytest.mark.parametrize(
    "ended, status, environ, is_queued",
    [
        ("finished", 0, {}, False),
        ("stopped", 0, {}, True),
        ("stopped", 0, {"REQUEUE": "0"}, False),
        ("failed", 2, {}, False),
        ("running", -9, {}, False),
    ],
)
def test_a_slurm_job_is_queued_again_if_its_run_was_stopped_and_keeps_its_status(
    stand_ins, ended, status, environ, is_queued
):
    variables, run = stand_ins
    card(run, ended)
    variables |= {"SLURM_JOB_ID": "7", "SLURM_CPUS_PER_TASK": "1", "STATUS": str(status % 256), **environ}
    done = subprocess.run(
        ["bash", ROOT / "scripts/slurm.sbatch"], env=variables, capture_output=True, text=True, timeout=LIMIT
    )
    assert done.returncode == status % 256, done.stderr
    assert (run / "requeued").exists() == is_queued
    arguments = (run / "arguments").read_text()
    assert arguments == f"-m zerojax.train --config configs/zero3.py --workdir {run} --config.steps=3 --config.seed=1\n"


def pod(environ):
    """Returns the command of the JobSet's pods, as the container of pod 1 starts it."""
    container = manifest()["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0]
    own = {variable["name"]: variable.get("value", "of a Secret") for variable in container["env"]}
    command = [*container["command"], *container["args"]]
    return subprocess.Popen(command, env={**own, "JOB_COMPLETION_INDEX": "1", **environ}, text=True)


@pytest.mark.parametrize(
    "ended, status, expected", [("finished", 0, 0), ("stopped", 0, 75), ("failed", 2, 2), ("failed", 1, 1)]
)
def test_a_pod_ends_with_the_status_of_its_run_and_one_that_was_stopped_is_not_complete(
    stand_ins, ended, status, expected
):
    variables, run = stand_ins
    card(run, ended)
    assert pod({**variables, "STATUS": str(status)}).wait(LIMIT) == expected
    arguments = (run / "arguments").read_text()
    assert arguments.endswith("--coordinator zerojax-hosts-0-0.zerojax:1234 --num_processes 2 --process_id 1\n")


def test_a_pod_passes_sigterm_on_and_waits_for_the_save(stand_ins):
    variables, run = stand_ins
    card(run, "stopped")
    started = pod({**variables, "HANGS": "1"})
    deadline = time.monotonic() + LIMIT
    while not (run / "started").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    started.send_signal(signal.SIGTERM)
    assert started.wait(LIMIT) == 75 and json.loads((run / "run.json").read_text())["status"] == "stopped"


def test_the_jobset_names_its_first_pod_and_counts_its_hosts_once():
    found = manifest()
    (job,) = found["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    container = spec["template"]["spec"]["containers"][0]
    assert (found["apiVersion"], found["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    address = f"{found['metadata']['name']}-{job['name']}-0-0.{found['spec']['network']['subdomain']}:"
    assert f"--coordinator {address}{container['ports'][0]['containerPort']} " in container["args"][0]
    hosts = next(int(variable["value"]) for variable in container["env"] if variable["name"] == "HOSTS")
    assert spec["completions"] == spec["parallelism"] == hosts and spec["completionMode"] == "Indexed"
    assert spec["podFailurePolicy"]["rules"][0]["onExitCodes"]["containerName"] == container["name"]


@pytest.fixture
def ray_train(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")  # as when it is run
    spec = importlib.util.spec_from_file_location("ray_train", ROOT / "scripts" / "ray_train.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_words_after_two_dashes_are_the_trainers(ray_train, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    options, words = ray_train.parse(["--workers", "2", "--", "--config", "a.py", "--workdir", "runs/a"])
    assert options.workers == 2 and words == ["--config", "a.py", "--workdir", "runs/a"]
    assert ray_train.workdir_of(words) == ray_train.workdir_of(["--workdir=runs/a"]) == "runs/a"
    assert 0 < ray_train.free_port() < 65536


@pytest.mark.parametrize("words", [["--workers=2"], ["--", "--workdir=a"], ["--workers=2", "--", "--workdir"]])
def test_wrong_words_of_the_ray_script_end_with_status_2(ray_train, monkeypatch, words):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    with pytest.raises(SystemExit) as end:
        ray_train.parse(words)
    assert end.value.code == 2
