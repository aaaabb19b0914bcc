"""The Python file of a classifier's network is run where its user named it, and elsewhere only when told."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from stride_cli.errors import ModelError
from stride_cli.models.classifier.networks import NetworkSpec, build_network
from tests.stride_cli.models.classifier.test_commands import run

CODE = """
from pathlib import Path
from torch.nn import Linear, ReLU, Sequential

Path({marker!r}).touch()


def network(shape, n_classes):
    Path({marker!r}).touch()
    return Sequential(Linear(shape[0], 8), ReLU(), Linear(8, n_classes))
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, table_file: Path) -> Path:
    """A directory with net.py, data.csv, model/, run.stride/ with operators; the network leaves a marker."""
    folder = tmp_path_factory.mktemp("made")
    (folder / "net.py").write_text(CODE.format(marker=str(folder / "marker")))
    shutil.copy(table_file, folder / "data.csv")
    columns = "--field label=status --field id=name --field drop=remark --holdout 9 --epochs 2"
    for line in (
        f"model train {folder}/data.csv {columns} --network {folder}/net.py --out {folder}/model",
        f"index build {folder}/data.csv --model {folder}/model --out {folder}/run.stride --subsets 30",
        f"train --index {folder}/run.stride",
    ):
        code, _, err = run(line)
        assert code == 0, err
    return folder


@pytest.fixture
def foreign(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it on a machine where nobody has made anything."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (made / "marker").unlink(missing_ok=True)
    return Path(shutil.copytree(made, tmp_path / "copy"))


def test_what_was_made_here_runs_here(made: Path) -> None:
    code, records, err = run(f"query p115 --index {made}/run.stride")
    assert code == 0 and records, err


def test_code_from_elsewhere_is_not_run_unasked(made: Path, foreign: Path) -> None:
    code, (record,), _ = run(f"model info {foreign}/model")
    assert code == 0 and record["layers"] is None and record["architecture"] == "network.py (not run)"
    assert record["parameters"] == 4 * 8 + 8 + 8 * 2 + 2 and record["vocabulary"] == 2
    code, _, err = run(f"index build {foreign}/data.csv --model {foreign}/model --out {foreign}/new.stride")
    assert code == 0, err
    for command in ("query p115", "train --overwrite"):
        code, records, err = run(f"{command} --index {foreign}/run.stride")
        assert code == 2 and not records and f"{foreign}/model/network.py is Python code" in err
        assert "--trust-code" in err
    with pytest.raises(ModelError, match="was not run"):  # as from a recipe
        code = CODE.format(marker=str(made / "marker"))
        build_network(NetworkSpec("adapter", adapter=code), (4,), 2, seed=0)
    with pytest.raises(TypeError, match="trusted"):  # nor does a file say that it is trusted
        NetworkSpec(**{**NetworkSpec("adapter", adapter=code).to_record(), "trusted": True})
    assert not (made / "marker").exists()


def test_told_so_it_is_run_once(made: Path, foreign: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    query = f"query p115 --index {foreign}/run.stride"
    code, records, err = run(f"{query} --trust-code")
    assert code == 0 and records, err
    assert (made / "marker").exists()
    assert run(query)[0] == 2  # nothing is remembered of a model that was not made here
    monkeypatch.setenv("STRIDE_GENERAL_TRUST_CODE", "1")
    assert run(query)[0] == 0


def test_whoever_trusts_it_in_a_build_trusts_it_in_the_index(made: Path, foreign: Path) -> None:
    build = f"index build {foreign}/data.csv --model {foreign}/model --out {foreign}/new.stride"
    assert run(f"{build} --trust-code")[0] == 0 and (made / "marker").exists()
    assert run(f"query p115 --index {foreign}/run.stride")[0] == 0


def test_fingerprints_come_first(made: Path, foreign: Path) -> None:
    code = foreign / "model" / "network.py"
    code.write_text(code.read_text() + "\n# and more\n")
    exit_code, _, err = run(f"query p115 --index {foreign}/run.stride --trust-code")
    assert exit_code == 3 and "was built for model" in err
    assert not (made / "marker").exists()
