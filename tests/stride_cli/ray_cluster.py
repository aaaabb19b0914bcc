"""Builds, fits and retrains on a Ray cluster of two nodes, while workers are killed and then a node.

    python ray_cluster.py INDEX MODEL QUERIES FOLDER

FOLDER has corpus.jsonl; into it go apart/ (the index that the nodes have built), ray.stride/ (its copy, with
the operators that they have fitted) and losses.npy (of `jobs_of`). In a session of its own: Ray's processes
end one another by process group and by name.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np

from index_format.reader import Index
from stride_cli import api
from stride_cli.data.query_files import read_texts
from stride_cli.data.workspace import Workspace
from stride_cli.errors import CorpusError
from stride_cli.models.spec import ModelSpec
from stride_cli.training.jobs import Job, Outcome, Trainer
from stride_cli.training.retraining import open_trainer, retrain

OPTIONS = api.ClosedOptions(rank=4, project=48, batch_tokens=64)


def jobs_of(trainer: Trainer) -> list[Job]:
    """Eight subsets and seeds."""
    random = np.random.default_rng(1)
    return [Job(random.random(trainer.n_chunks) < 0.5, number) for number in range(8)]


def open_jobs(place: str, model_path: str, asked: str) -> Trainer:
    """The trainer of an index's model, measured on the queries in a file."""
    index = Index.open(place)
    model = api.open_model(index, ModelSpec(model_path, device="cpu", dtype="fp32"))
    queries = read_texts(model, asked, block_size=index.attributes["block_size"])
    return open_trainer(Workspace.open(index, model), queries)


def main(place: str, model_path: str, asked: str, folder: Path) -> None:
    import ray
    from ray.cluster_utils import Cluster

    trainer = open_jobs(place, model_path, asked)
    jobs = jobs_of(trainer)
    store = folder / "ray"
    killed: list[str] = []

    def disturb() -> None:
        while len(list(store.glob("*.outcome"))) < 2:
            time.sleep(0.005)
        kill_worker()
        killed.append("worker")
        while len(list(store.glob("*.outcome"))) < 4:
            time.sleep(0.005)
        nodes.remove_node(node, allow_graceful=False)
        killed.append("node")

    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        nodes.add_node(num_cpus=1)
        ray.init(address=nodes.address, log_to_driver=False, logging_level="error")
        node = next(iter(nodes.worker_nodes))
        build(model_path, folder)
        fit(folder)
        disturber = threading.Thread(target=disturb)
        disturber.start()
        found = quietly(trainer, jobs, store)
        disturber.join()
        assert killed == ["worker", "node"]
        expected = [outcome.losses.tobytes() for outcome in found]
        written = {path.name: path.stat().st_mtime_ns for path in store.glob("*.outcome")}
        assert len(written) == 8
        again = quietly(trainer, jobs, store)
        assert [outcome.losses.tobytes() for outcome in again] == expected
        assert {path.name: path.stat().st_mtime_ns for path in store.glob("*.outcome")} == written
        np.save(folder / "losses.npy", np.stack([outcome.losses for outcome in found]))
        try:
            quietly(trainer, [Job(np.zeros(trainer.n_chunks, bool), 0)], store)
        except CorpusError as error:
            assert "no token to train on" in error.message
        else:
            raise AssertionError("an error of a task did not come back")
    finally:
        ray.shutdown()
        nodes.shutdown()


def build(model_path: str, folder: Path) -> None:
    """An index, by three tasks."""
    options = api.BuildOptions(engine="ray", workers=3)
    with contextlib.redirect_stdout(io.StringIO()) as said:
        api.build_index(
            [str(folder / "corpus.jsonl")], out=folder / "apart", options=options, model=model_path
        )
    assert said.getvalue() == ""


def fit(folder: Path) -> None:
    """Its operators, while a worker is killed over a range that it has saved."""
    os.sched_getaffinity = lambda process: {0, 1}  # which get one thread each, as tasks do
    index = Path(shutil.copytree(folder / "apart", folder / "ray.stride"))
    killed: list[int] = []

    def disturb() -> None:
        while not any(index.glob("operators.partial/scratch/shared/range-*/closed-pass.pt")):
            time.sleep(0.002)
        killed.append(kill_worker())

    disturber = threading.Thread(target=disturb, daemon=True)
    disturber.start()
    run = api.FitRunOptions(workers=2, engine="ray", save_seconds=0)
    with contextlib.redirect_stdout(io.StringIO()) as said:
        api.fit_index(index, OPTIONS, run=run, model=ModelSpec(device="cpu", dtype="fp32"))
    assert said.getvalue() == ""
    disturber.join(10)
    assert killed


def kill_worker() -> int:
    """End one of Ray's workers that does something, at once; its number."""
    line = ["pgrep", "-s", "0", "-f", "^ray::_run_on_ray"]
    while not (found := subprocess.run(line, capture_output=True, text=True).stdout.split()):
        time.sleep(0.002)  # between two tasks it is called otherwise
    worker = int(found[0])
    os.kill(worker, signal.SIGKILL)
    return worker


def quietly(trainer: Trainer, jobs: list[Job], store: Path) -> list[Outcome]:
    """`retrain` on the cluster; what it says is not on stdout."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        found = retrain(trainer, jobs, store=store, engine="ray")
    assert said.getvalue() == ""
    return found


if __name__ == "__main__":
    # at other times Ray may say there what became of its nodes: here the cluster is this script's own
    with contextlib.redirect_stdout(sys.stderr):
        main(*sys.argv[1:4], Path(sys.argv[4]))
