"""The command line's fixtures, for the commands of research."""

from tests.stride_cli.commands.conftest import as_by_default, few_read, run, run_apart, workspace

__all__ = ["as_by_default", "few_read", "run", "run_apart", "workspace"]
