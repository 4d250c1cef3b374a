"""docs/cluster.md says what is so: commands, files, links, numbers and messages are real, and so is what is printed."""

import importlib.util
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from csc.pipelines.profile import read_profile
from csc.pipelines.scenario import compile_pipeline
from csc.scenario import Scenario
from csc.tracking import calls
from tests.kfp_recorded import recorded
from tests.kfp_server import TOKEN, KfpServer, Refused

pytest_plugins = ["tests.cluster"]

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/cluster.md").read_text()
COMMANDS = re.findall(r"^\$ csc (.*)$", PAGE, re.MULTILINE)
SHOWN = dict(re.findall(r"^\$ csc (.*)\n((?:(?!\$ |```).*\n)+)", PAGE, re.MULTILINE))  # what a command printed
HOST = "https://kubeflow.example.com/pipeline"

Csc = Callable[..., tuple[int, list[str], str]]


@pytest.fixture(scope="module")
def sizing() -> ModuleType:
    spec = importlib.util.spec_from_file_location("sizing", ROOT / "docs/sizing.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_estimates_are_what_the_script_computes(sizing: ModuleType):
    assert sizing.table() in PAGE
    assert f"| GPU memory | {sizing.memory():.1f} GB |" in PAGE
    assert f"{sizing.cores('A100'):.1f} for an A100, {sizing.cores('T4'):.1f} for a T4" in PAGE


def test_more_classes_at_once_mean_more_images_in_a_task(sizing: ModuleType):
    tasks, test = sizing.images("coco-b40c10")
    assert tasks[0] > 2 * tasks[1] > 2 * 1000
    assert tasks[0] < 82_081
    assert test == 40_137


def test_the_commands_are_found():
    used = {"submit", "status", "logs", "retry", "ingest", "compile", "predict"}
    assert {command.split()[0] for command in COMMANDS} == used
    assert {command.split()[0] for command in SHOWN} == used - {"predict"}


def test_every_file_and_manifest_is_there():
    named = set(re.findall(r"\b(?:deploy|docs|tests|images|pipelines)/[\w./-]+\.\w+", PAGE))
    assert len(named) > 10
    assert [name for name in sorted(named) if not (ROOT / name).is_file()] == []
    manifests = {path.name for path in (ROOT / "deploy").glob("*.yaml")} - {"kustomization.yaml"}
    assert manifests <= set(re.findall(r"[\w.-]+\.yaml", PAGE))


def headings(page: Path) -> set[str]:
    """The names by which the headings of a page can be linked to."""
    lines = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", line.lower()).replace(" ", "-") for line in lines}


@pytest.mark.parametrize("name", ["cluster.md", "kfp.md"])
def test_every_link_leads_somewhere(name: str):
    links = re.findall(r"\]\(([^)\s]+)\)", (ROOT / "docs" / name).read_text())
    assert links
    for link in links:
        file, _, heading = link.partition("#")
        page = ROOT / "docs" / (file or name)
        assert page.is_file(), link
        assert not heading or heading in headings(page), link


def test_the_cache_is_a_disk_of_the_pod_and_the_pages_say_so():
    profile = read_profile("kubeflow")
    cache, volume = profile.env["CSC_CACHE"], profile.storage.volume.path
    assert not Path(cache).is_relative_to(volume)  # others may drop there what is mapped here
    assert f"`CSC_CACHE`: in the\nprofile `{cache}`, on the pod's own disk" in PAGE
    assert f"`storage.data: {volume}/data/{{dataset}}`" in PAGE


MEANINGS = [*calls._AWAY.values(), *calls._REFUSED.values()]


@pytest.mark.parametrize("meaning", MEANINGS, ids=lambda meaning: meaning.split(";")[0][:30])
def test_what_a_bad_server_looks_like_is_explained(meaning: str):
    begin = meaning.split("{")[0].split("_USERNAME")[0].strip("( ")
    assert begin in " ".join(PAGE.split())


def as_shown(text: str) -> "re.Pattern[str]":
    """A pattern of what is printed, as the page has it: `…` stands for some lines, or for some words of a line."""
    lines = ("(?:.*\n)*" if line == "…" else re.escape(line).replace("…", ".*") + "\n" for line in text.splitlines())
    return re.compile("".join(lines))


@pytest.fixture
def kubeflow(machine: None, server: KfpServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> KfpServer:
    """A server that knows the recorded runs, and the profile and token by which the page names it."""
    profile = yaml.safe_load((ROOT / "pipelines/profiles/kubeflow.yaml").read_text().replace("example.com", "internal"))
    profile["cluster"] |= {"host": server.host, "namespace": "csc"}
    profile["tracking"]["uri"] = ""
    (tmp_path / "my-cluster.yaml").write_text(yaml.safe_dump(profile))
    monkeypatch.setenv("KF_TOKEN", TOKEN)
    return server


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, object]]:
    """The pipeline that was recorded, which had no exit handler."""
    file = tmp_path_factory.mktemp("compiled") / "pipeline.yaml"
    compile_pipeline(Scenario.parse("digits-b0c2"), 10, file)
    return list(yaml.load_all(file.read_text(), yaml.CSafeLoader))


@pytest.mark.parametrize("command", [one for one in SHOWN if one.split()[0] in ("status", "logs", "retry", "compile")])
def test_what_is_printed_is_what_the_recorded_answers_come_to(
    kubeflow: KfpServer, documents: list[dict[str, object]], csc: Csc, command: str
):
    for name in ("failed", "succeeded", "cached"):
        kubeflow.record(recorded(name), documents)
    _, lines, error = csc(*shlex.split(command))
    printed = "".join(f"{line}\n" for line in (*lines, *error.splitlines())).replace(kubeflow.host, HOST)
    assert as_shown(SHOWN[command]).fullmatch(printed), printed


@pytest.mark.slow
def test_what_submit_prints(kubeflow: KfpServer, csc: Csc):
    def finish(method: str, path: str) -> None:
        for run in kubeflow.progress.values():
            run.begun = 1000

    (command,) = [one for one in SHOWN if one.startswith("submit")]
    kubeflow.trouble = finish
    code, lines, error = csc(*shlex.split(command))
    assert (code, error) == (0, "")
    printed = "".join(f"{line}\n" for line in lines).replace(kubeflow.host, HOST)
    changing = r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|(?<=version )[0-9a-f]{16}|(?<=run succeeded after ).*"
    assert as_shown(re.sub(changing, "*", SHOWN[command])).fullmatch(re.sub(changing, "*", printed)), printed


def test_what_a_server_for_many_users_refuses(kubeflow: KfpServer, csc: Csc, monkeypatch: pytest.MonkeyPatch):
    def forbid(method: str, path: str) -> None:
        raise Refused(403, "User may not get runs")

    access = ("--host", kubeflow.host, "--token-env", "KF_TOKEN")
    kubeflow.multi_user = True
    Path("nameless.yaml").write_text("storage: {data: /mnt/csc/data}")
    errors = {400: csc("submit", "digits-b0c5", "--profile", "nameless.yaml", *access)[2]}
    kubeflow.trouble = forbid
    errors[403] = csc("status", "some-run", *access)[2]
    monkeypatch.setenv("KF_TOKEN", "too-old")
    kubeflow.trouble = KfpServer().trouble
    errors[401] = csc("status", "some-run", *access)[2]
    for status, error in errors.items():
        (row,) = re.findall(rf"^\| `([^`]* \({status}\)[^`]*)`", PAGE, re.MULTILINE)
        assert as_shown(f"csc: {kubeflow.host}: {row}").fullmatch(f"{error}\n"), error


def test_the_sizes_are_those_of_the_page_on_studies_and_of_the_code():
    from csc.pipelines.package import STEPS, STEPS_LIMIT

    (row,) = re.findall(r"^\| run of coco-b0c5 \|(.*)\|$", (ROOT / "docs/studies.md").read_text(), re.MULTILINE)
    steps, _, step, _, share = (cell.strip() for cell in row.split("|"))
    text = " ".join(PAGE.split())
    assert f"a step takes about {step} of it; a run of `coco-b0c5`, {steps} steps, fills {share} of 1 MiB" in text
    assert f"{STEPS_LIMIT} steps in a run, {STEPS} in a pipeline of a study" in text
