"""Imports what running a method on a model imports, when it is imported; see `startup.preload`."""

from stride_cli.startup import preload

preload()
