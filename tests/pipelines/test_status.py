"""status, logs, stop and retry: what a person sees of runs that a real server described, and of runs of a small one."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from csc.pipelines.cluster import run as remote
from csc.pipelines.scenario import compile_pipeline
from csc.scenario import Scenario
from csc.storage import write_bytes
from tests.kfp_recorded import recorded
from tests.kfp_server import TOKEN, KfpServer, Refused, running

pytest_plugins = ["tests.cluster", "tests.s3"]
pytestmark = pytest.mark.usefixtures("machine")

Csc = Callable[..., tuple[int, list[str], str]]
COMMANDS = ("status", "logs", "stop", "retry")
NOTE = "Kubeflow no longer tells how the steps stand: the workflow has grown over 1 MiB"
FAILED_POD = "csc-digits-b0c2-mlsl7-system-container-impl-666018923"
TRACEBACK = 'Traceback (most recent call last):\n  File "x.py", line 1\nTypeError: Cannot instantiate typing.Union\n'


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The pipeline that was recorded, which had no exit handler."""
    file = tmp_path_factory.mktemp("compiled") / "pipeline.yaml"
    compile_pipeline(Scenario.parse("digits-b0c2"), 10, file)
    return list(yaml.load_all(file.read_text(), yaml.CSafeLoader))


@pytest.fixture
def replayed(server: KfpServer, documents: list[dict[str, Any]]) -> Callable[[str], tuple[str, ...]]:
    """Have the server answer as a real one did; returns the words that name the run and how to reach it."""

    def replay(name: str) -> tuple[str, ...]:
        run_id = server.record(recorded(name), documents)
        return run_id, "--host", server.host, "--token-env", "MY_TOKEN"

    return replay


@pytest.fixture
def started(server: KfpServer, csc: Csc) -> Callable[..., tuple[str, ...]]:
    """Submit a scenario of three tasks; returns the words that name the run and how to reach it."""

    def start(*more: object) -> tuple[str, ...]:
        flags = ("--host", server.host, "--token-env", "MY_TOKEN")
        code, _, error = csc("submit", "digits-b0c4", "--profile", "mine.yaml", *flags, *more)
        assert code in (0, 1), error
        return list(server.runs)[-1], *flags

    return start


def test_status_of_a_recorded_run_on_its_way(replayed: Callable[[str], tuple[str, ...]], csc: Csc):
    words = replayed("running")
    assert csc("status", *words) == (
        0,
        [
            "digits-b0c2 csc seed 0",
            "ingest                   succeeded after 21 s",
            "task 1 · split-labels    succeeded after 10 s",
            "task 1 · build-dataset   succeeded after 20 s",
            "task 1 · train           succeeded after 1 min 55 s",
            "task 1 · evaluate        succeeded after 37 s",
            "task 1 · register        starting",
            "run running",
            f"{words[2]}/#/runs/details/{words[0]}",
        ],
        "",
    )


def test_status_of_a_recorded_run_that_failed_names_step_pod_and_the_end_of_its_log(
    replayed: Callable[[str], tuple[str, ...]], server: KfpServer, csc: Csc, monkeypatch: pytest.MonkeyPatch
):
    words = replayed("failed")
    monkeypatch.setattr(remote, "LAST_LINES", 3)
    server.logs[FAILED_POD] = f"many lines\n{TRACEBACK}"
    code, lines, _ = csc("status", *words)
    assert code == 1
    assert lines[9:] == [
        "task 2 · train           failed after 1 min 21 s",
        "run failed after 10 min 5 s at task 2 · train",
        f"pod         {FAILED_POD}",
        f"log         csc logs {words[0]} --host {server.host} --token-env MY_TOKEN, which ends in",
        "  Traceback (most recent call last):",
        '    File "x.py", line 1',
        "  TypeError: Cannot instantiate typing.Union",
        f"{server.host}/#/runs/details/{words[0]}",
    ]


def test_status_of_a_recorded_run_over_1_mib_says_so_and_goes_by_the_state_of_the_run(
    replayed: Callable[[str], tuple[str, ...]], csc: Csc
):
    _, lines, _ = csc("status", *replayed("over-1MiB"))
    assert lines[-3:-1] == [
        f"{NOTE}; at least 3 more have finished since",
        "run running",
    ]
    code, lines, _ = csc("status", *replayed("succeeded"))
    assert code == 0
    assert lines[-3:-1] == [
        f"{NOTE}; at least 12 more have finished since",
        "run succeeded after 18 min 5 s",
    ]
    assert not [line for line in lines if "running" in line or "starting" in line]


@pytest.mark.parametrize(("name", "code"), [("failed", 1), ("succeeded", 0), ("cached", 0)])
def test_waiting_for_a_recorded_run_that_has_ended_ends_at_once(
    replayed: Callable[[str], tuple[str, ...]], csc: Csc, name: str, code: int
):
    found, lines, error = csc("status", *replayed(name), "--wait")
    assert (found, error) == (code, "")
    assert sum("run failed" in line or "run succeeded" in line for line in lines) == 1
    assert sum("over 1 MiB" in line for line in lines) == (name == "succeeded")


@pytest.mark.parametrize("name", ["running", "over-1MiB"])
def test_waiting_for_a_recorded_run_goes_on_until_it_has_ended(
    replayed: Callable[[str], tuple[str, ...]], server: KfpServer, csc: Csc, name: str
):
    words = replayed(name)
    looks = iter(range(100))

    def end_after_a_while(method: str, path: str) -> None:
        if path.endswith(words[0]) and next(looks) == 3:
            server.runs[words[0]] |= {"state": "CANCELED", "finished_at": "2026-11-17T08:00:00Z"}

    server.trouble = end_after_a_while
    code, lines, _ = csc("status", *words, "--wait")
    assert code == 1
    assert lines[-1].startswith("run canceled after ")
    assert len([line for line in lines if "task 1 · train" in line]) == 1


def test_a_run_is_named_by_its_id_or_the_address_of_its_page(started: Callable[..., tuple[str, ...]], csc: Csc):
    run_id, flag, host, *more = started("--tasks", "3")
    for _ in range(3):
        csc("status", run_id, flag, host, *more)
    code, lines, _ = csc("status", f"{host}/#/runs/details/{run_id}", flag, host, *more)
    assert code == 0
    assert lines == [
        "digits-b0c4 · csc · seed 0 · tasks 3",
        "ingest                   succeeded after 48 s",
        "prior                    succeeded after 48 s",
        "task 3 · split-labels    succeeded after 48 s",
        "task 3 · build-dataset   running",
        "run running",
        f"{host}/#/runs/details/{run_id}",
    ]


def test_a_profile_names_the_cluster_for_every_command(
    replayed: Callable[[str], tuple[str, ...]], server: KfpServer, csc: Csc, tmp_path: Path
):
    run_id, *_ = replayed("failed")
    (tmp_path / "there.yaml").write_text(f"cluster: {{host: '{server.host}', namespace: team}}")
    words = (run_id, "--profile", "there.yaml", "--token-env", "MY_TOKEN")
    assert f"kubectl -n team logs {FAILED_POD} -c main" in csc("status", *words)[1][-2]
    assert csc("logs", *words)[2].endswith(f"try: kubectl -n team logs {FAILED_POD} -c main")
    assert "-n other logs" in csc("logs", *words, "--namespace", "other")[2]
    assert csc("stop", *words)[:2] == (
        0,
        [
            "nothing to stop: run failed after 10 min 5 s at task 2 · train",
            f"status      csc status {run_id} --profile there.yaml --token-env MY_TOKEN",
        ],
    )
    assert csc("retry", run_id, "--profile", "nowhere.yaml")[2].startswith("csc: --profile nowhere.yaml: no such file")


def test_the_namespace_of_the_pods_is_that_of_the_experiment(
    replayed: Callable[[str], tuple[str, ...]], server: KfpServer, csc: Csc
):
    words = replayed("failed")
    (experiment,) = server.experiments.values()
    experiment["namespace"] = "team-a"
    assert f"kubectl -n team-a logs {FAILED_POD} -c main" in csc("logs", *words)[2]


@pytest.mark.parametrize("pages", [False, True], ids=["the API's address", "the pages' address"])
def test_logs_prints_what_the_step_that_failed_has_printed(
    replayed: Callable[[str], tuple[str, ...]], server: KfpServer, csc: Csc, pages: bool
):
    words = replayed("failed")
    server.pages = pages
    server.logs[FAILED_POD] = TRACEBACK
    assert csc("logs", *words) == (0, TRACEBACK.splitlines(), "")


def test_logs_of_a_step_by_its_name_and_task(replayed: Callable[[str], tuple[str, ...]], server: KfpServer, csc: Csc):
    words = replayed("failed")
    server.logs["csc-digits-b0c2-mlsl7-system-container-impl-835719898"] = "digits"
    server.logs["csc-digits-b0c2-mlsl7-system-container-impl-658788106"] = "task 1/5"
    assert csc("logs", words[0], "ingest", *words[1:]) == (0, ["digits"], "")
    for name in ("1/train", "task 1 · train", "1 train", "TASK 1/TRAIN"):
        assert csc("logs", words[0], name, *words[1:]) == (0, ["task 1/5"], "")
    code, _, error = csc("logs", words[0], "train", *words[1:])
    assert code == 2
    assert error == (
        "csc: 'train' is the name of several steps: task 1 · train, task 2 · train; give a number too, for instance "
        "2/train"
    )
    assert csc("logs", words[0], "embed", *words[1:])[2].startswith(
        "csc: no step 'embed' has begun; there are: ingest, task 1 · "
    )


def test_logs_of_a_run_on_its_way_are_those_of_the_last_step(
    started: Callable[..., tuple[str, ...]], server: KfpServer, csc: Csc
):
    words = started()
    csc("status", *words)
    workflow = server.progress[words[0]].workflow
    assert workflow is not None
    server.logs[workflow.pod(("root", "exit-handler-1", "ingest"))] = "so far"
    server.progress[words[0]].begun -= 1
    assert csc("logs", *words) == (0, ["so far"], "")


def test_a_log_cannot_change_the_terminal(replayed: Callable[[str], tuple[str, ...]], server: KfpServer, csc: Csc):
    words = replayed("failed")
    server.logs[FAILED_POD] = "\x1b]0;title\x07\x1b[2J10 %\r20 %\r\n\tnext\x00\x9b\u202e\x1b[1mbold\x1b[0m  two\n"
    assert csc("logs", *words)[1] == ["20 %", "        next   bold  two"]
    assert not [line for line in csc("status", *words)[1] if not line.isprintable()]


def test_a_reused_step_has_no_log_in_this_run(replayed: Callable[[str], tuple[str, ...]], csc: Csc):
    run_id, *flags = replayed("cached")
    code, _, error = csc("logs", run_id, "3/train", *flags)
    assert code == 2
    assert error == "csc: task 3 · train was reused: its log is that of the run that made it"


def test_a_run_without_steps_has_no_log(started: Callable[..., tuple[str, ...]], server: KfpServer, csc: Csc):
    words = started()
    server.progress.clear()
    assert csc("logs", *words)[::2] == (2, "csc: no step of this run has begun yet, or all were reused")


@pytest.fixture
def kubeflow_bucket(bucket: str) -> str:
    """A bucket for the artifacts of the recorded run that failed, as its launcher would leave them."""
    answer = recorded("failed")
    answer["runtime_config"]["pipeline_root"] = bucket.replace("s3://", "minio://")
    below = f"{bucket}/csc-digits-b0c2/{answer['run_id']}/train"
    for name, text in {
        "1a64/executor-logs-0": "task 1/5: fine",
        "1a64/model": "a model",
        "77aa/executor-logs-0": "task 2/5: first try",
        "77aa/executor-logs-10": "task 2/5: eleventh try",
        "77aa/executor-logs-9": "task 2/5: tenth try",
    }.items():
        write_bytes(f"{below}/{name}", text.encode())
    return json.dumps(answer)


def test_a_log_whose_pod_is_gone_comes_from_the_bucket(
    kubeflow_bucket: str, server: KfpServer, documents: list[dict[str, Any]], csc: Csc
):
    run_id = server.record(json.loads(kubeflow_bucket), documents)
    words = (run_id, "--host", server.host, "--token-env", "MY_TOKEN")
    assert csc("logs", *words) == (0, ["task 2/5: eleventh try"], "")
    assert csc("logs", run_id, "1/train", *words[1:]) == (0, ["task 1/5: fine"], "")
    assert "no log from here" in csc("logs", run_id, "1/evaluate", *words[1:])[2]
    assert "  task 2/5: eleventh try" in csc("status", *words)[1]


def test_stop_ends_a_run(started: Callable[..., tuple[str, ...]], server: KfpServer, csc: Csc):
    words = started()
    csc("status", *words)
    assert csc("stop", *words) == (
        0,
        [
            "the run is being stopped; its pods end within their grace period",
            f"status      csc status {' '.join(words)}",
        ],
        "",
    )
    code, lines, _ = csc("status", *words)
    assert code == 1
    assert lines[-2].startswith("run canceled")
    assert f"POST /runs/{words[0]}:terminate" in server.calls
    assert csc("stop", *words)[1][0].startswith("nothing to stop: run canceled")


def test_retry_tries_the_failed_steps_again(started: Callable[..., tuple[str, ...]], server: KfpServer, csc: Csc):
    server.fails_at = ("train", 2)
    words = started("--wait")
    code, lines, error = csc("retry", *words)
    assert (code, error) == (0, "")
    assert lines == ["the failed steps are tried again", f"status      csc status {' '.join(words)}"]
    code, lines, _ = csc("status", *words, "--wait")
    assert code == 0
    assert lines[-1].startswith("run succeeded")


def test_retry_may_be_waited_for(started: Callable[..., tuple[str, ...]], server: KfpServer, csc: Csc):
    server.fails_at = ("train", 2)
    code, lines, _ = csc("retry", *started("--wait"), "--wait")
    assert code == 0
    assert lines[0] == "the failed steps are tried again"
    assert lines[-1].startswith("run succeeded")


AGAIN = "submit it again with the command that started it: finished steps are reused"


def test_a_retry_that_kubeflow_cannot_do_is_to_be_submitted_again(
    started: Callable[..., tuple[str, ...]], server: KfpServer, csc: Csc
):
    server.fails_at, server.retries = ("train", 2), False
    words = started("--wait")
    code, _, error = csc("retry", *words)
    assert code == 2
    assert "the server failed (500): Failed to retry run: rpc error" in error
    assert error.endswith(AGAIN)
    assert len(error.splitlines()) == 1


def test_a_run_over_1_mib_is_not_even_asked_for_a_retry(
    replayed: Callable[[str], tuple[str, ...]], server: KfpServer, csc: Csc
):
    words = replayed("over-1MiB")
    server.runs[words[0]]["state"] = "FAILED"
    code, _, error = csc("retry", *words)
    assert (code, error) == (
        2,
        f"csc: {server.host}: run {words[0]}: its workflow has grown over 1 MiB, which Kubeflow cannot write back; "
        f"{AGAIN}",
    )
    assert not [call for call in server.calls if "POST" in call]


@pytest.mark.parametrize("name", ["running", "cached"])
def test_only_a_run_that_failed_is_tried_again(replayed: Callable[[str], tuple[str, ...]], csc: Csc, name: str):
    code, _, error = csc("retry", *replayed(name))
    assert code == 2
    assert error.endswith("only a run that failed can be tried again")


def test_a_pipeline_that_was_deleted_leaves_the_names_of_the_workflow(
    replayed: Callable[[str], tuple[str, ...]], server: KfpServer, csc: Csc
):
    words = replayed("failed")
    server.versions.clear()
    code, lines, error = csc("status", *words)
    assert (code, error) == (1, "")
    assert "run failed after 10 min 5 s at incremental-task · train" in lines


def refusing(status: int, message: str) -> Callable[[str, str], None]:
    def trouble(method: str, path: str) -> None:
        raise Refused(status, message)

    return trouble


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("trouble", "said"),
    [
        (refusing(401, "no valid user identity"), "not logged in (401)"),
        (refusing(403, f"{TOKEN} may not\x1b[2J read runs"), "not allowed (403): … may not read runs"),
        (refusing(404, "no such run"), "not found (404): no such run; check --host and the run's id"),
        (refusing(500, "database is locked"), "the server failed (500): database is locked"),
        (lambda *_: (200, "text/html", "<html>Log in</html>"), "answers with a web page, not with the API"),
        (lambda *_: (200, "application/json", "null"), "its answer is not one of Kubeflow Pipelines v2beta1"),
        (lambda *_: (200, "application/json", '{"run_id": "x", "created_at": "soon"}'), "its answer is not one of"),
        (
            lambda *_: (200, "application/json", '{"run_id": "x", "run_details": {"task_details": 3}}'),
            "its answer is not one of",
        ),
    ],
    ids=["401", "403", "404", "500", "html", "null", "no-time", "no-list"],
)
def test_bad_answers_are_one_clear_line(server: KfpServer, csc: Csc, command: str, trouble: Any, said: str):
    server.trouble = trouble
    code, lines, error = csc(command, "some-run", "--host", server.host, "--token-env", "MY_TOKEN")
    assert (code, lines) == (2, [])
    assert error.startswith(f"csc: {server.host}: ")
    assert said in error
    assert error.isprintable()


def test_names_and_reasons_cannot_change_the_terminal(
    replayed: Callable[[str], tuple[str, ...]], server: KfpServer, csc: Csc
):
    words = replayed("failed")
    run = server.runs[words[0]]
    run["display_name"] = "\x1b[31mred\x07"
    run["error"] = {"code": 1, "message": "first\nsecond\x1b[0m"}
    for detail in run["run_details"]["task_details"]:
        detail["error"] = {"message": "exit\x08 code 1"}
    _, lines, _ = csc("status", *words)
    assert lines[0] == "red"
    assert "task 2 · train           failed after 1 min 21 s: exit code 1" in lines
    assert "run failed after 10 min 5 s at task 2 · train: first second" in lines
    assert not [line for line in lines if not line.isprintable()]


DAMAGED: list[dict[str, Any]] = [
    {"root": {"dag": 3}},
    {"root": {"dag": {"tasks": []}}},
    {"root": {"dag": {"tasks": {"ingest": None}}}},
    {"root": {}, "components": {"a": 1}},
    {"root": {}, "pipelineInfo": "csc"},
    {"root": {}, "platforms": {"kubernetes": 3}},
]


def test_a_spec_of_another_form_is_no_spec(replayed: Callable[[str], tuple[str, ...]], server: KfpServer, csc: Csc):
    words = replayed("running")
    for content in (None, [], {"pipeline_spec": None}, {"pipeline_spec": [1]}, {"root": 3}, "text", *DAMAGED):
        for version in server.versions.values():
            version["pipeline_spec"] = content
        code, lines, error = csc("status", *words)
        assert (code, error) == (0, "")
        assert "base-task · train        succeeded after 1 min 55 s" in lines


def test_without_a_token_the_commands_are_refused_by_the_server(csc: Csc):
    with running(KfpServer(token=TOKEN)) as kfp:
        for command in COMMANDS:
            assert "not logged in (401)" in csc(command, "some-run", "--host", kfp.host)[2]


def test_the_words_of_the_commands_are_found(csc: Csc, capsys: pytest.CaptureFixture[str]):
    for command in COMMANDS:
        with pytest.raises(SystemExit):
            csc(command, "--help")
        text = capsys.readouterr().out
        for flag in ("--profile", "--host", "--token-env", "--cookie-env", "--namespace"):
            assert flag in text
