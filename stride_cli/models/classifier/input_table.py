"""The inputs of a classifier: standardised alike in training and in use, and known by number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stride_cli.errors import QueryError


@dataclass(frozen=True)
class Standardisation:
    """Inputs become (x − mean) / deviation: one number each for images, one a column for tables."""

    mean: np.ndarray
    deviation: np.ndarray

    @classmethod
    def of(cls, inputs: np.ndarray, *, by_column: bool) -> Standardisation:
        """Mean and deviation of training inputs (n, …), float64; a constant column is divided by 1."""
        values = inputs.astype(np.float64)
        axis = 0 if by_column else None
        deviation = np.asarray(values.std(axis=axis))
        return cls(np.asarray(values.mean(axis=axis)), np.where(deviation > 1e-12, deviation, 1.0))

    def apply(self, inputs: np.ndarray) -> np.ndarray:
        """(B, …) numbers → (B, …) float32."""
        return ((inputs - self.mean) / self.deviation).astype(np.float32)


class InputTable:
    """Inputs by number: the chunks of an index first, then every row of its file, then what queries bring.

    Number i < n is chunk i's input; n + r is row r of the file, so that a held-out row has the same number in
    every process; later numbers are inputs registered since.

    Parameters
    ----------
    data : (N, …) numbers        all rows of the file
    chunk_rows : (n,) int64      the row of each chunk
    """

    def __init__(self, data: np.ndarray, chunk_rows: np.ndarray) -> None:
        self.data = data
        self.chunk_rows = np.asarray(chunk_rows, np.int64)
        self._added: list[np.ndarray] = []
        self._known: dict[bytes, int] = {}  # content of an added input → its number

    @property
    def n_chunks(self) -> int:
        return len(self.chunk_rows)

    def __len__(self) -> int:
        return self.n_chunks + len(self.data) + len(self._added)

    def add(self, inputs: np.ndarray) -> np.ndarray:
        """Append inputs (B, …); their numbers, (B,) int64. One that was added before keeps its number."""
        numbers = []
        for row in np.asarray(inputs, np.float64):
            key = row.tobytes()
            if key not in self._known:
                self._known[key] = len(self)
                self._added.append(row)
            numbers.append(self._known[key])
        return np.asarray(numbers, np.int64)

    def of_rows(self, rows: np.ndarray | Sequence[int]) -> np.ndarray:
        """Numbers of rows of the file, (B,) int64."""
        return self.n_chunks + np.asarray(rows, np.int64)

    def take(self, numbers: np.ndarray) -> np.ndarray:
        """Inputs (B, …) by number.

        Raises
        ------
        QueryError      no such number
        """
        n, rows = self.n_chunks, len(self.data)
        if len(numbers) and not (numbers.min() >= 0 and numbers.max() < len(self)):
            wrong = int(numbers.max()) if numbers.max() >= len(self) else int(numbers.min())
            raise QueryError(
                f"there is no input number {wrong} (the model knows {len(self):,})",
                fix="give the file of the queries again (--queries FILE); from Python: register() its inputs",
            )
        if (numbers < n + rows).all():
            below = np.where(numbers < n, numbers, 0)
            return self.data[np.where(numbers < n, self.chunk_rows[below] if n else 0, numbers - n)]
        found = []
        for number in numbers.tolist():
            if number < n + rows:
                found.append(self.data[self.chunk_rows[number] if number < n else number - n])
            else:
                found.append(self._added[number - n - rows])
        return np.stack(found)
