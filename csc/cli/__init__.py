"""The `csc` command; heavy packages are imported only by the commands that need them."""

import os
import signal
import sys
from argparse import ArgumentParser
from collections.abc import Sequence

from csc import __version__
from csc.errors import CscError, Terminated
from csc.report.text import single_line

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
        print("csc:", single_line(str(error)), file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        from csc.cli.preflight import EXTRAS, missing_packages

        package = (error.name or "").partition(".")[0]
        if package not in EXTRAS:
            raise
        print("csc:", missing_packages(package), file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader of our output went away, for instance `csc … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return code
    except KeyboardInterrupt as error:
        terminated = isinstance(error, Terminated)
        what = f"{'ended by SIGTERM' if terminated else 'interrupted'} {error}".strip()
        print(f"csc: {what}; the same command resumes the work", file=sys.stderr)
        return 128 + (signal.SIGTERM if terminated else signal.SIGINT)


def _parser() -> ArgumentParser:
    from csc.cli import (
        cluster,
        compare,
        doctor,
        extend,
        ingest,
        lists,
        predict,
        report,
        run,
        sample,
        serve,
        show,
        study,
        submit,
        ui,
    )

    commands = {
        "compare": compare.COMPARE,
        "compile": run.COMPILE,
        "doctor": doctor.DOCTOR,
        "extend": extend.EXTEND,
        "ingest": ingest.INGEST,
        "logs": cluster.LOGS,
        "methods": lists.METHODS,
        "predict": predict.PREDICT,
        "report": report.REPORT,
        "retry": cluster.RETRY,
        "run": run.RUN,
        "sample": sample.SAMPLE,
        "scenarios": lists.SCENARIOS,
        "serve": serve.SERVE,
        "settings": lists.SETTINGS,
        "show": show.SHOW,
        "status": cluster.STATUS,
        "stop": cluster.STOP,
        "study": study.STUDY,
        "submit": submit.SUBMIT,
        "ui": ui.UI,
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
