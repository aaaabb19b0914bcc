"""Retrains on a Ray cluster of two nodes, kills a worker and then a node, and compares with one process.

    python ray_cluster.py INDEX MODEL QUERIES FOLDER

In a session of its own: Ray's processes end one another by process group and by name.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
from ray.cluster_utils import Cluster

from index_format.reader import Index
from stride_cli import api
from stride_cli.data.query_files import read_texts
from stride_cli.data.workspace import Workspace
from stride_cli.errors import CorpusError
from stride_cli.training import engines
from stride_cli.training.jobs import Job, Outcome, Trainer
from stride_cli.training.retraining import open_trainer, retrain
from tests.same_fit import assert_same_fit

ENGINES = ("ray", "local")


def main(place: str, model_path: str, asked: str, folder: Path) -> None:
    import ray

    index = Index.open(place)
    model = api.open_model(index, model_path, device="cpu", dtype="fp32")
    queries = read_texts(model, asked, block_size=index.attributes["block_size"])
    trainer = open_trainer(Workspace.open(index, model), queries)
    trainer.at_once = 1  # groups of single jobs, so that a few keep several workers busy
    random = np.random.default_rng(1)
    jobs = [Job(random.random(trainer.n_chunks) < 0.5, number) for number in range(8)]
    alone = retrain(trainer, jobs, store=folder / "alone", workers=1)
    expected = [outcome.losses.tobytes() for outcome in alone]
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
        assert [outcome.losses.tobytes() for outcome in found] == expected
        written = {path.name: path.stat().st_mtime_ns for path in store.glob("*.outcome")}
        assert len(written) == 8
        again = quietly(trainer, jobs, store)
        assert [outcome.losses.tobytes() for outcome in again] == expected
        assert {path.name: path.stat().st_mtime_ns for path in store.glob("*.outcome")} == written
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
    """An index that the nodes build is, byte by byte, the one that this process builds."""
    corpus = folder / "corpus.jsonl"
    corpus.write_text(
        "".join(json.dumps({"id": f"d{n}", "text": f"{n} is {n + 1} " * n}) + "\n" for n in range(1, 36))
    )
    found = []
    for name, engine in (("whole", "local"), ("apart", "ray")):
        options = api.BuildOptions(engine=engine, workers=3 if engine == "ray" else None)
        with contextlib.redirect_stdout(io.StringIO()) as said:
            api.build_index([str(corpus)], model_path=model_path, out=folder / name, options=options)
        assert said.getvalue() == ""
        files = sorted(path for path in (folder / name).rglob("*") if path.is_file())
        found.append({path.relative_to(folder / name): path.read_bytes() for path in files})
    assert found[0] == found[1]


def fit(folder: Path) -> None:
    """Operators that the nodes fit, one worker of which is killed over a range that it has saved, are to the
    bit those of two processes."""
    engines.available_cores = lambda: 2  # which get one thread each, as tasks do
    fitted = {name: Path(shutil.copytree(folder / "whole", folder / f"{name}.stride")) for name in ENGINES}
    killed: list[int] = []

    def disturb() -> None:
        while not any(fitted["ray"].glob("operators.partial/scratch/shared/range-*/closed-pass.pt")):
            time.sleep(0.002)
        killed.append(kill_worker())

    disturber = threading.Thread(target=disturb, daemon=True)
    disturber.start()
    for name, index in fitted.items():
        options = api.ClosedOptions(rank=4, project=48, batch_tokens=64)
        run = api.FitRunOptions(workers=2, engine=name, save_seconds=0)
        with contextlib.redirect_stdout(io.StringIO()) as said:
            api.train(index, options, run=run, device="cpu", dtype="fp32")
        assert said.getvalue() == ""
    disturber.join(10)
    assert killed
    assert_same_fit(*(index / "operators" for index in fitted.values()))


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
