"""The `csc` command; heavy packages are imported only by the commands that need them."""

import os
import signal
import sys
from argparse import ArgumentParser
from collections.abc import Sequence

from csc import __version__
from csc.errors import CscError

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; bad input ends in one line and exit code 2."""
    code: int = 128 + signal.SIGPIPE  # if the reader of our output goes away before the work is done
    try:
        parser = _parser()
        parsed = parser.parse_args(arguments)
        if parsed.command is None:
            parser.print_help()
            code = 0
        else:
            code = parsed.command.run(parsed)
        sys.stdout.flush()
        return code
    except CscError as error:
        print("csc:", " ".join(str(error).split()), file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader of our output went away, for instance `csc … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return code
    except KeyboardInterrupt:
        print("csc: interrupted; the same command resumes the work", file=sys.stderr)
        return 130


def _parser() -> ArgumentParser:
    from csc.cli.cluster import LOGS, RETRY, STATUS, STOP
    from csc.cli.doctor import DOCTOR
    from csc.cli.extend import EXTEND
    from csc.cli.ingest import INGEST
    from csc.cli.methods import METHODS
    from csc.cli.predict import PREDICT
    from csc.cli.run import COMPILE, RUN
    from csc.cli.scenarios import SCENARIOS
    from csc.cli.serve import SERVE
    from csc.cli.study import STUDY
    from csc.cli.submit import SUBMIT
    from csc.cli.ui import UI

    commands = {
        "compile": COMPILE,
        "doctor": DOCTOR,
        "extend": EXTEND,
        "ingest": INGEST,
        "logs": LOGS,
        "methods": METHODS,
        "predict": PREDICT,
        "retry": RETRY,
        "run": RUN,
        "scenarios": SCENARIOS,
        "serve": SERVE,
        "status": STATUS,
        "stop": STOP,
        "study": STUDY,
        "submit": SUBMIT,
        "ui": UI,
    }
    parser = ArgumentParser(prog="csc", description="Multi-label class-incremental learning as a pipeline.")
    parser.add_argument("--version", action="version", version=f"csc {__version__}")
    parser.set_defaults(command=None)
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name, command in commands.items():
        sub = subparsers.add_parser(name, help=command.help, description=command.help)
        command.arguments(sub)
        sub.set_defaults(command=command)
    return parser
