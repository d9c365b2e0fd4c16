"""The ``autoflash`` program: finds the module of a command, and turns errors into exit codes."""

from __future__ import annotations

import importlib
import signal
import sys
from collections.abc import Sequence
from types import FrameType

import click

from autoflash import __version__
from autoflash.errors import AutoflashError, DatabaseError, InvalidProblemError, UnsupportedError

DONE, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130

# Command to module: a command's imports are paid for by that command alone.
COMMANDS = {
    "tune": "autoflash.cli.tune",
    "show": "autoflash.cli.show",
    "explain": "autoflash.cli.explain",
    "analyze": "autoflash.cli.analyze",
    "render": "autoflash.cli.render",
    "verify": "autoflash.cli.verify",
    "bench": "autoflash.cli.bench",
    "plot": "autoflash.cli.plot",
    "export": "autoflash.cli.export",
    "import": "autoflash.cli.import_table",
    "doctor": "autoflash.cli.doctor",
    "warmup": "autoflash.cli.warmup",
}


class _Commands(click.Group):
    """A group whose commands are imported when they are asked for; each module's command is named ``command``."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """In the order of use, not of the alphabet."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command, or None where there is no such one."""
        if cmd_name not in COMMANDS:
            return None
        command = importlib.import_module(COMMANDS[cmd_name]).command
        assert isinstance(command, click.Command)
        return command


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="autoflash")
def program() -> None:
    """Find the fastest correct attention kernel for this machine, and use it.

    \b
    autoflash tune        search on this device; run it again to resume
    autoflash show        what was found
    autoflash export      a table for machines that must not tune

    Exit codes: 0 done, 1 something asked for failed, 2 usage or environment, 130 interrupted.
    """  # noqa: D301 - \b is click's mark of a paragraph to leave as it is


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program.

    Args:
        arguments: Of the command line; None for the process's own.

    Returns:
        The exit code.
    """
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        given = None if arguments is None else list(arguments)
        outcome = program.main(given, prog_name="autoflash", standalone_mode=False)
        sys.stdout.flush()
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        click.echo("Interrupted.", err=True)
        return INTERRUPTED
    except AutoflashError as error:
        click.echo(f"Error: {error}", err=True)
        return USAGE if isinstance(error, (DatabaseError, InvalidProblemError, UnsupportedError)) else FAILED
    except (BrokenPipeError, SystemExit):
        # The reader (head, less) has seen enough: click turns most of these errors into an exit of its own, and
        # nothing else here into one. Python would complain again when it flushes at exit.
        sys.stdout = None
        return DONE
    finally:
        signal.signal(signal.SIGTERM, before)
    return outcome if isinstance(outcome, int) else DONE


def _interrupt(signum: int, frame: FrameType | None) -> None:
    """A polite request to end is handled like Ctrl-C: the trial in flight is given up, the rest is recorded."""
    raise KeyboardInterrupt
