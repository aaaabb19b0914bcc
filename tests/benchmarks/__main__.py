"""`python -m tests.benchmarks NAME [options]`: run one benchmark, one JSON line per measurement on stdout."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path


def main(arguments: list[str]) -> int:
    names = sorted(path.stem for path in Path(__file__).parent.glob("[a-z]*.py"))
    if not arguments or arguments[0] not in names:
        print(f"usage: python -m tests.benchmarks {{{','.join(names)}}} [--help]", file=sys.stderr)
        return 2
    # where a benchmark can fail, it says so
    return importlib.import_module(f"tests.benchmarks.{arguments[0]}").main(arguments[1:]) or 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
