"""Every path of the fit, the query and the reading on a device, compared with the CPU.

    python -m tests.gpu.device_paths pretend|cuda      one JSON line a path; 1 where one fails

``pretend`` is `tests.gpu.pretend_device`, which computes on the CPU and refuses to mix with it. What is
compared does not hang on the sign of an eigenvector or on the order of two that are equally strong:
responses, products, steps, influences, tokens; gates where there is no basis to choose.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from stride_cli.models.spec import ModelSpec
from stride_cli.operators.spaces import SPACES

K, DEGREE, CHUNKS = 12, 3, 40
TOLERANCE = 1e-4  # CPU and GPU, relative
EVERY_SPACE = "mlp-matrix+residual-matrix+logit+token-logit+pair-logit"


class Paths:
    """What is compared, of one model on one device; `device` "cpu" gives what is to be expected."""

    def __init__(self, device: str) -> None:
        from stride_cli.data.batches import ChunkReader
        from tests.tiny_chunks import MemoryIndex, tiny_model

        self.device, self.model = device, tiny_model()
        self.model.model.to(device)
        index: Any = MemoryIndex(CHUNKS)
        self.chunks = ChunkReader(index)
        random = np.random.default_rng(1)
        self.columns = np.stack(
            [np.sort(random.choice(K, DEGREE, replace=False)) for _ in range(CHUNKS)]
        ).astype(np.uint16)

    def fit(self, space: str, **changes: Any) -> Any:
        from stride_cli.operators.closed import ClosedSettings, fit_closed

        chosen = ClosedSettings(
            spaces=tuple(space.split("+")), layer=2, ranks=dict.fromkeys(SPACES, 4), **changes
        )
        return fit_closed(self.model, self.chunks, self.columns, K, chosen)

    def closed(self, space: str, **changes: Any) -> list[np.ndarray]:
        """What the subsets answer a few chunks, in closed form."""
        from stride_cli.operators.linear_response import measure_linear_with_loss
        from stride_cli.operators.steered_model import SteeredModel

        fitted = self.fit(space, **changes)
        steered = SteeredModel.of(self.model, fitted)
        found = [*measure_linear_with_loss(steered, self.chunks.batch(np.arange(8)))]
        return found if fitted.projections is None else [*found, fitted.projections.step]

    def closed_in_turns(self) -> list[np.ndarray]:
        """As `closed`, on a device that has room for one subset."""
        from stride_cli.operators import subset_sums

        with mock.patch.object(subset_sums, "rows_at_once", lambda *given, **named: 1):
            return self.closed("mlp-matrix+logit", project=64)

    def query(self) -> list[np.ndarray]:
        """Linear and exact measurement, reading, estimates by projections."""
        from stride_cli.attribution.direct import query_gradients
        from stride_cli.operators.gradients import gradient_products
        from stride_cli.operators.linear_response import measure_linear_with_loss
        from stride_cli.operators.steered_model import SteeredModel
        from stride_cli.research.paper.exact_response import measure_exact

        operators = self.fit(EVERY_SPACE, project=64)
        steered = SteeredModel.of(self.model, operators)
        batch = self.chunks.batch(np.arange(3))
        found = [*measure_linear_with_loss(steered, batch)]
        operators.step = 0.1
        found.append(measure_exact(steered, batch.take(slice(0, 2)), batch_size=K))
        asked = query_gradients(steered, [batch])
        found.append(gradient_products(steered, asked, self.chunks, np.arange(5, 20)).sum(axis=0))
        assert operators.projections is not None
        found.append(operators.projections.asked(asked).estimates(0, self.chunks.n_chunks))
        return found

    def labels(self) -> list[np.ndarray]:
        """A classifier, fitted with every label counted."""
        from stride_cli.data.batches import ChunkReader
        from stride_cli.models.classifier.classifier_model import ClassifierModel, InputTable, Standardisation
        from stride_cli.models.classifier.networks import MLP
        from stride_cli.operators.closed import ClosedSettings, fit_closed
        from stride_cli.operators.linear_response import measure_linear_with_loss
        from stride_cli.operators.steered_model import SteeredModel
        from tests.tiny_chunks import MemoryIndex

        torch.manual_seed(0)
        inputs = np.random.default_rng(2).normal(size=(CHUNKS, 5))
        standard = Standardisation(np.zeros(()), np.ones(()))
        model = ClassifierModel(MLP(5, [8, 8], 3), classes="abc", shape=(5,), standardisation=standard)
        model.table = InputTable(inputs, np.arange(CHUNKS))
        model.model.to(self.device)
        index: Any = MemoryIndex(CHUNKS)
        index.arrays = {
            "corpus/tokens": np.stack([np.arange(CHUNKS), np.arange(CHUNKS) % 3], axis=1).ravel(),
            "corpus/chunk_offsets": 2 * np.arange(CHUNKS + 1),
            "corpus/loss_start": np.ones(CHUNKS, np.int32),
        }

        chosen = ClosedSettings(
            spaces=("head-matrix", "linear-matrix"), layer=1, ranks={"head-matrix": 5, "linear-matrix": 4},
            curvature="exact",
        )  # fmt: skip
        chunks = ChunkReader(index)
        steered = SteeredModel.of(model, fit_closed(model, chunks, self.columns, K, chosen))
        return [*measure_linear_with_loss(steered, chunks.batch(np.arange(8)))]

    def generation(self) -> list[np.ndarray]:
        prompts = [[row, 3, 5] for row in range(2)]
        return [np.asarray(row, float) for row in self.model.generate_together(prompts, 12)]

    def streamed(self) -> list[np.ndarray]:
        """Weights that come to the device while their block runs, and again for its gradients."""
        from stride_cli.models.language.causal_lm import CausalLM
        from stride_cli.models.language.streaming import stream_from_memory
        from tests.tiny_chunks import VOCABULARY
        from tests.tiny_models import tiny_nanochat

        network = tiny_nanochat(VOCABULARY, width=24, layers=3)
        stream_from_memory(network, torch.device(self.device))
        resident, self.model = self.model, CausalLM(network)
        try:
            assert self.model.device.type == self.device
            return [*self.closed("linear-matrix+residual-matrix"), *self.generation()]
        finally:
            self.model = resident

    def whole(self) -> list[np.ndarray]:
        """An index on disk: `train`, then queries that generate, measure, read and answer by token."""
        from stride_cli import api
        from stride_cli.attribution.by_token import token_influences

        made, on_device = _made(), ModelSpec(device=self.device, dtype="fp32")
        with tempfile.TemporaryDirectory() as folder:
            index = Path(shutil.copytree(made / "run.stride", Path(folder, "run.stride")))
            # of all directions: where a basis ends between two that are as strong, digits decide
            api.fit_index(index, api.ClosedOptions(project=64), model=on_device)
            session = api.Session.open(index, model=on_device)
            assert session.model.device.type == self.device
            options = api.QueryOptions(measure="exact", read=8, decisive=False)  # weights magnify digits
            answer = session.query("The French Revolution", options, response=" began in 1789")
            generated = session.query("The river", api.QueryOptions(read=8, decisive=False))
            parts = token_influences(session, answer)
        assert answer.responses is not None and generated.responses is not None
        return [
            answer.responses,
            np.asarray([hit.influence for hit in answer.supporters[:3]]),
            parts.whole[:1],
            np.asarray(generated.query.ids, float),
            generated.responses,
        ]


@cache
def _made() -> Path:
    """A trained model, an index without operators, and queries; gone when the process ends."""
    from tests.trained_model import make_trained

    global _folder
    _folder = tempfile.TemporaryDirectory()
    make_trained(Path(_folder.name))
    return Path(_folder.name)


_folder: Any = None


def paths() -> dict[str, Callable[[Paths], list[np.ndarray]]]:
    """By name, what each gives on a device."""
    return {
        "query": Paths.query,
        "closed": lambda on: on.closed("mlp-matrix+logit+token-logit+pair-logit", project=64),
        "closed, linear-matrix": lambda on: on.closed("linear-matrix+residual-matrix"),
        "closed, fisher": lambda on: on.closed("residual+logit"),
        "closed, added up in memory": Paths.closed_in_turns,
        "classifier": Paths.labels,
        "generation": Paths.generation,
        "streamed": Paths.streamed,
        "whole": Paths.whole,
    }


def compare(device: str, chosen: str = "") -> Iterator[dict[str, Any]]:
    """One record a path: how far off the device is from the CPU, relative, or why it could not run."""
    for name, path in paths().items():
        if chosen and name != chosen:
            continue
        expected = path(Paths("cpu"))
        try:
            found = path(Paths(device))
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)
            where = next(
                (
                    f"{frame.filename.split('/')[-1]}:{frame.lineno} {frame.line}"
                    for frame in reversed(last)
                    if "stride_cli" in frame.filename
                ),
                "",
            )
            yield {"path": name, "ok": False, "error": str(error).splitlines()[0], "where": where}
            continue
        off = max(_off(own, wanted) for own, wanted in zip(found, expected, strict=True))
        yield {"path": name, "ok": off <= TOLERANCE, "difference": off}


def _off(found: np.ndarray, expected: np.ndarray) -> float:
    if found.shape != expected.shape:
        return float("inf")
    scale = float(np.linalg.norm(expected.astype(np.float64)))
    return float(np.linalg.norm(found.astype(np.float64) - expected)) / max(scale, 1e-30)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.device_paths", description=__doc__)
    parser.add_argument("device", choices=("pretend", "cuda"))
    parser.add_argument("--path", default="", help="only this one")
    parser.add_argument(
        "--rounding", type=float, default=0.0, help="pretend: products are off by as much, relative"
    )
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if given.device == "pretend":
        from tests.gpu import pretend_device

        pretend_device.rounding = given.rounding
    failed = 0
    # packed gates would make a step of two bits of a last digit
    with mock.patch("stride_cli.operators.store.PACKED_BYTES", 1 << 40):
        for record in compare(given.device, given.path):
            print(json.dumps(record), flush=True)
            failed += not record["ok"]
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
