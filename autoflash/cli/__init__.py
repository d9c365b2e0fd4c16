"""The command line: one small module per command."""

from autoflash.cli.application import main

__all__ = ["main"]
