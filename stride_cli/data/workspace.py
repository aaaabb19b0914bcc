"""An index with its model and its chunks: where everything that reads an index and runs its model starts."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from index_format.location import Given, Location, RemotePath, is_elsewhere, locate
from stride_cli.models.kinds import refuse_classifier
from stride_cli.models.spec import GivenModel, ModelSpec
from stride_cli.output import progress
from stride_cli.startup import without_collection

if TYPE_CHECKING:
    import numpy as np

    from index_format.reader import Index
    from stride_cli.data.batches import ChunkReader
    from stride_cli.models.protocol import AttributableModel


@dataclass(frozen=True)
class Workspace:
    """A frozen model and the chunks it was (or may have been) trained on.

    Attributes
    ----------
    index : Index
    model : AttributableModel
    chunks : ChunkReader       the n chunks; batches of ids and loss weights
    seed : int                 names every random stream (`stride_cli.randomness.stream`)
    """

    index: Index
    model: AttributableModel
    chunks: ChunkReader
    seed: int

    @classmethod
    def open(
        cls, index: Index | str | Path | RemotePath, model: AttributableModel | GivenModel | None = None
    ) -> Workspace:
        """An index, and its model compared with it.

        Parameters
        ----------
        index : Index, or the path or URL of one
        model : one that is loaded, its path or `ModelSpec`; default: where the index says that it is

        Raises
        ------
        IndexNotFound, IndexDamaged, IndexVersionError
        IndexMismatch      the model is not the index's
        ModelError         it cannot be loaded, or the index does not say where it is
        """
        from index_format.reader import Index
        from stride_cli.data.batches import ChunkReader

        opened = index if isinstance(index, Index) else open_index(index)
        if model is None or isinstance(model, str | Path | ModelSpec):
            model = open_model(opened, model)
        check_bounds(opened)
        if not opened.has("operators"):  # else it was done before they were fitted
            model.check_padding(int(opened.attributes["block_size"]))
        return cls(opened, model, ChunkReader(opened, model), opened.seed)

    @property
    def n_chunks(self) -> int:
        return int(self.chunks.n_chunks)

    def texts(self, rows: np.ndarray) -> list[str]:
        """The given chunks as text.

        Raises
        ------
        UsageError      the model is none of language
        """
        refuse_classifier(self.index, "this method reads text", fix="choose another method")
        tokenizer = self.model.tokenizer
        return [
            str(tokenizer.decode(self.chunks.chunk(int(row))[0], skip_special_tokens=True)) for row in rows
        ]


def check_bounds(index: Index) -> None:
    """`Index.check_bounds`, once for an index on disk.

    It is a pass over the design and the maps of all chunks. What they hold is compared with the manifest when
    it is first read, and so is no other while the manifest is the same.

    Raises
    ------
    IndexDamaged
    """
    from stride_cli.remembered import recall, remember

    local = isinstance(index.path, Path) and index.path.is_dir()  # else ranges of files are not compared
    if local and recall("bounds", index.digest) is not None:
        return
    index.check_bounds()
    if local:
        remember("bounds", index.digest, str(index.path))


@dataclass(frozen=True)
class WorkspacePath:
    """Arguments with which another process opens the same workspace; see `Workspace.open`."""

    index: Location
    model: ModelSpec = field(default_factory=ModelSpec)

    def open(self) -> Workspace:
        """Open the workspace; a classifier gets the inputs of the truth's queries, known by number."""
        import numpy as np

        opened = Workspace.open(self.index, self.model)
        table, index = opened.model.table, opened.index
        if table is not None and index.has("truth") and "truth/query_inputs" in index.names("truth"):
            table.add(np.asarray(index.array("truth/query_inputs")))
        return opened


@without_collection()
@progress("opening the model")
def open_model(index: Index, given: GivenModel | None = None) -> AttributableModel:
    """The model of an index, its weights, tokenizer and settings compared with the index's fingerprints.

    Of a classifier's index: a `ClassifierModel` with the index's rows as its inputs (see `open_classifier`).

    Raises
    ------
    ModelError         no path is given, and the index records none, or one that leads nowhere
    IndexMismatch      another model, tokenizer or settings than the index's
    """
    from stride_cli.models.loading import load_model_of, path_of_model

    spec = ModelSpec.of(given)
    return load_model_of(index, spec if spec.place else spec.at(path_of_model(index, spec.permissions)))


def open_index(given: Given) -> Index:
    """Open an index; errors are those of `Index.open`."""
    from index_format.reader import Index

    where = locate(given)
    if not is_elsewhere(where):
        return Index.open(where)
    with progress(f"fetching {where.name}", unit="MB") as ticker:

        def tell(done: int, total: int) -> None:
            ticker.describe(f"fetching {where.name} ({total / 1e6:,.0f} MB)")
            ticker.reach(done / 1e6)

        return Index.open(where, progress=tell)
