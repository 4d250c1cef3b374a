"""`csc study`: run the cells of a study that are not finished, and print its tables."""

import sys
import tempfile
from argparse import SUPPRESS, ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from pathlib import Path

from csc.cli.command import Command
from csc.cli.run import class_count
from csc.cli.submit import check_edited, check_on_cluster, open_submission, start_run, submission_arguments
from csc.cli.workdir import use_profile, use_workdir, workdir_argument
from csc.config import parse_overrides
from csc.data.dataset import Dataset
from csc.data.ingest.digits import VERSION, ingest_digits
from csc.errors import BadConfig, BadData
from csc.pipelines.local.interrupts import interruptible
from csc.pipelines.local.lock import make_workdir
from csc.pipelines.profile import SHIPPED as PROFILES
from csc.pipelines.profile import Profile, read_profile, run_defaults
from csc.scenario import CLASS_COUNTS, Scenario
from csc.storage import absolute, local_path
from csc.study.cells import Cell, DataSource, Result, cells, distinct, results
from csc.study.files import log_outcome, write_files
from csc.study.local import command_of, run_cells
from csc.study.outcome import Outcome
from csc.study.reading import SHIPPED, read_study
from csc.study.render import text
from csc.study.spec import Study
from csc.study.summary import marked_studies, results_document, write_results

__all__ = ["STUDY"]


def _arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "study", nargs="*", help=f"YAML file, or one of {', '.join(SHIPPED)}; several or none only with --markdown"
    )
    parser.add_argument(
        "--data",
        metavar="[NAME=]URI",
        action="append",
        default=[],
        help="folder or s3:// of a data set made by 'csc ingest' (digits make themselves); again for another one",
    )
    _subset_arguments(parser)
    parser.add_argument("--parallel", type=int, metavar="N", help="cells at the same time (default: the profile's)")
    parser.add_argument(
        "--profile", help=f"YAML file, or one of {', '.join(PROFILES)} (default: local, with --submit kubeflow)"
    )
    workdir_argument(parser)
    parser.add_argument("-o", "--output", metavar="DIR", help="folder of the tables (default: WORKDIR/studies)")
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--dry-run", action="store_true", help="list the cells and which are finished; run nothing")
    instead.add_argument(
        "--markdown",
        nargs="?",
        const="-",
        metavar="FILE",
        help="print claims and tables of what is finished, by whatever version; or put them into the marked parts of "
        "FILE, of all studies that it has unless some are named",
    )
    instead.add_argument("--compile", metavar="FILE", help="write pipelines for a cluster instead of running")
    instead.add_argument("--submit", action="store_true", help="run on a Kubeflow cluster; see 'csc submit'")
    submission_arguments(parser)
    parser.add_argument("--runner", choices=["forked", "subprocess"], default="forked", help="see 'csc run'")
    parser.add_argument("--verbose", action="store_true", help="show all output of the steps")


def _subset_arguments(parser: ArgumentParser) -> None:
    """Declare what chooses a part of a study, on the command line and in the marks of a document."""
    parser.add_argument("--scenarios", metavar="A,B", help="instead of the study's own; any will do")
    parser.add_argument("--methods", metavar="A,B", help="only the rows of these methods")
    parser.add_argument("--seeds", metavar="0,1", help="instead of the study's own")
    parser.add_argument("--set", metavar="KEY=VALUE", action="append", default=[], dest="overrides", help="a setting")


def _subset(study: Study, chosen: Namespace) -> Study:
    scenarios, rows = _comma_separated(chosen.scenarios), _comma_separated(chosen.methods)
    return study.subset(scenarios, rows, _seeds(chosen.seeds), parse_overrides(chosen.overrides))


def _asked(arguments: Namespace) -> list[Study]:
    """The studies that are named, or that a document has; what its marks say of one wins over the command line."""
    document = arguments.markdown
    marked = marked_studies(local_path(document)) if document not in (None, "-") else {}
    studies = []
    for study in map(read_study, arguments.study or marked):
        parser = ArgumentParser(f"csc: {document}: results {study.name}", usage=SUPPRESS, add_help=False)
        _subset_arguments(parser)
        studies.append(_subset(_subset(study, arguments), parser.parse_args(marked.get(study.name, []))))
    return studies


def _study(arguments: Namespace) -> int:
    studies = _asked(arguments)
    if not studies:
        raise BadConfig("csc study: name a study, or with --markdown a document that has the marks of some")
    if len(studies) > 1 and not arguments.markdown:
        raise BadConfig("csc study: runs one study at a time; several can be summarised with --markdown")
    study = studies[0]
    if arguments.parallel is not None and arguments.parallel < 1:
        raise BadConfig(f"--parallel {arguments.parallel}: expected 1 or more")
    profile = read_profile(arguments.profile or ("kubeflow" if arguments.submit else "local"))
    if arguments.compile:
        return _compile(arguments, study, profile)
    if arguments.submit:
        return _submit(arguments, study, profile)
    use_profile(profile)
    workdir = use_workdir(arguments.workdir)
    if arguments.markdown:
        return _write_document(arguments, studies, profile, workdir)
    folder = local_path(arguments.output or workdir / "studies")
    sources = _local_sources(study, arguments.data, profile, workdir, make=not arguments.dry_run)
    asked = cells(study, sources)
    known = results(asked)
    if arguments.dry_run:
        return _list(known)
    if left := _unfinished(known):
        failed = _run(arguments, study, left, profile, workdir)
        known = results(asked, failed=failed, tried={cell.name for cell in left})
    outcome = Outcome(study, tuple(known))
    files = write_files(outcome, folder)
    log_outcome(outcome)
    print(f"\n{text(outcome)}\n")
    done, refused = sum(not result.missing for result in known), sum(bool(cell.refused) for cell in asked)
    print(f"cells     {done} of {len(known)} finished, {len(outcome.failed)} failed, {refused} not run")
    print(f"tables    {', '.join(str(file) for file in files)}")
    if outcome.failed:
        print("csc: cells failed; the same command tries them again and keeps the others", file=sys.stderr)
    return 1 if outcome.failed else 0


def _write_document(arguments: Namespace, studies: Sequence[Study], profile: Profile, workdir: Path) -> int:
    """Print what is finished of some studies, or put it into a document; nothing is run."""
    document = local_path(arguments.markdown)
    outcomes = []
    for study in studies:
        sources = _local_sources(study, arguments.data, profile, workdir, make=False)
        outcomes.append(Outcome(study, tuple(results(cells(study, sources), any_code=True))))
    if arguments.markdown == "-":
        print(results_document(outcomes))
    else:
        write_results(document, outcomes)
        for outcome in outcomes:
            if missing := len(outcome.missing):
                count = f"{missing} of {len(outcome.results)} cells"
                print(
                    f"study '{outcome.study.name}': {count} are missing, and told as 'not run' in {arguments.markdown}"
                )
    return 0


def _comma_separated(text: str | None) -> list[str] | None:
    if text is None:
        return None
    return [word.strip() for word in text.split(",") if word.strip()]


def _seeds(text: str | None) -> list[int] | None:
    words = _comma_separated(text)
    if words is None:
        return None
    if not (words and all(word.isdecimal() for word in words)):
        raise BadConfig(f"--seeds {text}: expected whole numbers with commas, for instance 0,1,2")
    return list(dict.fromkeys(map(int, words)))


def _uris(
    study: Study, given: Sequence[str], profile: Profile, name_of: Callable[[str, str], str]
) -> dict[str, tuple[Scenario, str]]:
    """For each data set that the study needs, a scenario of it and its uri: given, or the profile's; empty if neither.

    `name_of` finds the name of a given data set from the name that stands before its uri, often none, and the uri.
    """
    uris: dict[str, str] = {}
    for data in given:
        stated, uri = _name_and_uri(data)
        name = name_of(stated, uri)
        if name in uris:
            raise BadData(f"--data {uri}: the data set '{name}' was given before; give one uri for each")
        uris[name] = uri
    needed = {scenario.dataset: scenario for scenario in map(Scenario.parse, study.scenarios)}
    unused = [name for name in uris if name not in needed]
    for name, scenario in needed.items():
        uris[name] = uris.get(name) or run_defaults(profile, scenario).get("data") or ""
    missing = [name for name in needed if not uris[name] and name != "digits"]
    if unused and missing:
        raise BadData(
            f"--data: gives {', '.join(unused)}, but the scenarios of study '{study.name}' need {', '.join(missing)}"
        )
    return {name: (scenario, uris[name]) for name, scenario in needed.items()}


def _name_and_uri(data: str) -> tuple[str, str]:
    """Take `voc=s3://bucket/voc` apart; the name is empty if none is given."""
    name, equals, uri = data.partition("=")
    return (name, uri) if equals and "/" not in name else ("", data)


def _local_sources(
    study: Study, given: Sequence[str], profile: Profile, workdir: Path, *, make: bool
) -> dict[str, DataSource]:
    """The data sets that the study needs, as far as they are at hand; digits are made if they are not."""

    def name_of(name: str, uri: str) -> str:
        dataset = Dataset.open(absolute(uri))
        if name not in ("", dataset.name):
            raise BadData(f"--data {name}={uri}: holds the data set '{dataset.name}'")
        return dataset.name

    sources: dict[str, DataSource] = {}
    for name, (_, known) in _uris(study, given, profile, name_of).items():
        uri = absolute(known or workdir / "data" / f"digits-{VERSION}") if known or name == "digits" else ""
        if name == "digits" and make and not Dataset.exists(uri):
            ingest_digits(uri)
        if uri and Dataset.exists(uri):
            sources[name] = DataSource.open(uri)
        elif uri and name in CLASS_COUNTS:
            sources[name] = DataSource(uri, CLASS_COUNTS[name])
    return sources


def _cluster_sources(study: Study, given: Sequence[str], profile: Profile) -> dict[str, DataSource]:
    """The data sets of a cluster; one is opened from here only if its number of classes cannot be known otherwise."""
    datasets = {Scenario.parse(name).dataset for name in study.scenarios}

    def name_of(name: str, uri: str) -> str:
        if not name and len(datasets) > 1:
            raise BadData(f"--data {uri}: the study has several data sets, say which this is: --data NAME={uri}")
        return name or next(iter(datasets))

    return {
        name: DataSource(uri, CLASS_COUNTS.get(name) or class_count(scenario, uri))
        for name, (scenario, uri) in _uris(study, given, profile, name_of).items()
        if uri
    }


def _list(known: Sequence[Result]) -> int:
    """Print every cell and how it stands."""
    for result in known:
        state = "finished" if not result.missing else "to run" if not result.cell.refused else "not run"
        reason = "" if state != "not run" else f": {result.reason}"
        print(f"{state:<10}{result.cell.name}{reason}")
    finished, to_run = sum(not result.missing for result in known), len(distinct(_unfinished(known)))
    print(f"{len(known)} cells, {finished} finished, {to_run} to run")
    return 0


def _unfinished(known: Sequence[Result]) -> list[Cell]:
    """The cells that are still to be run."""
    return [result.cell for result in known if result.missing and not result.cell.refused]


def _run(arguments: Namespace, study: Study, left: Sequence[Cell], profile: Profile, workdir: Path) -> dict[str, str]:
    """Run cells on this machine; return why some failed."""
    from csc.tracking.queries import ping_server

    runs = distinct(left)
    scenarios = dict.fromkeys(cell.scenario.name for cell in left)
    count = "1 run" if len(runs) == 1 else f"{len(runs)} runs"
    print(f"{study.title}: {count} to do, on {', '.join(scenarios)}", flush=True)
    print(f"the output of each run is in {workdir / 'logs'}", flush=True)
    options = ["--runner", arguments.runner, *(["--verbose"] if arguments.verbose else [])]
    options += ["--profile", arguments.profile] if arguments.profile else []
    make_workdir(workdir)
    ping_server()  # fails now, not in every run, if the server is away; makes the database
    with interruptible():
        return run_cells(
            runs,
            lambda cell: command_of(cell, str(workdir), options),
            lambda cell: results([cell], tried={cell.name})[0],
            parallel=arguments.parallel or profile.study.parallelism,
            verbose=arguments.verbose,
        )


def _compile(arguments: Namespace, study: Study, profile: Profile) -> int:
    """Write the pipeline of the whole study; what is finished there is known there."""
    if not arguments.compile.endswith((".yaml", ".yml")):
        raise BadData(f"--compile {arguments.compile}: expected a file name that ends in .yaml")
    for file, runs in _compiled(local_path(arguments.compile), arguments, study, profile):
        print(f"wrote {file}: {runs} runs")
    return 0


def _submit(arguments: Namespace, study: Study, profile: Profile) -> int:
    """Run the whole study on a cluster; return the exit code."""
    check_edited(arguments.profile or "kubeflow", profile)
    for _, uri in map(_name_and_uri, arguments.data):
        check_on_cluster(uri)
    endpoint = open_submission(arguments, profile)
    from csc.pipelines.study import study_name

    with tempfile.TemporaryDirectory(prefix="csc-submit-") as folder:
        packages = _compiled(Path(folder) / f"{study_name(study)}.yaml", arguments, study, profile)
        codes = [
            start_run(arguments, endpoint, profile, package, study_name(study), f"{study.title}, {runs} runs", {})
            for package, runs in packages
        ]
    return max(codes)


def _compiled(whole: Path, arguments: Namespace, study: Study, profile: Profile) -> list[tuple[Path, int]]:
    """Write the pipelines of a study, one file each, and return how many runs each has."""
    sources = _cluster_sources(study, arguments.data, profile)
    from csc.pipelines.package import write_package
    from csc.pipelines.study import build_study, split_into_pipelines

    cut = split_into_pipelines(cells(study, sources))
    if len(cut) > 1:
        print(f"{len(cut)} pipelines, because a cluster cannot hold the state of more steps in one; any order will do")
    written = []
    for number, part in enumerate(cut, start=1):
        file = whole if len(cut) == 1 else whole.with_stem(f"{whole.stem}-{number}")
        write_package(build_study(study, part, sources, profile, arguments.parallel), file, on_cluster=True)
        written.append((file, len(part)))
    return written


STUDY = Command(
    "run a study, such as a table of the paper, and print it next to the paper's numbers", _study, _arguments
)
