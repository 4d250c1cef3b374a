"""Submitting to a cluster, over HTTP, to a server that checks what it is sent."""

import json
import re
import socket
import threading
from datetime import UTC, datetime

import kfp_server_api
import pytest
import yaml

from csc.cli import main
from csc.pipelines import endpoint, watch
from csc.pipelines.endpoint import TOKEN_VARIABLE
from csc.pipelines.watch import duration, steps_of
from tests.kfp_server import KfpServer, Refused, check_arguments, running

TOKEN = "a-token-nobody-may-see"
COOKIE = "oauth2_proxy_kubeflow=a-cookie-nobody-may-see"
SCENARIO = "digits-b0c4"  # three tasks


@pytest.fixture(autouse=True)
def machine(tmp_path, monkeypatch):
    """A person's machine: a profile, secrets in the environment, no cluster around, and no waiting."""
    monkeypatch.chdir(tmp_path)
    for name in (TOKEN_VARIABLE, "KF_PIPELINES_UI_ENDPOINT", "SSL_CERT_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MY_TOKEN", TOKEN)
    monkeypatch.setenv("MY_COOKIE", COOKIE)
    monkeypatch.setattr(endpoint, "TOKEN_FILE", tmp_path / "no-token")
    monkeypatch.setattr(watch, "POLL_SECONDS", 0.0)
    (tmp_path / "mine.yaml").write_text("storage: {data: 's3://bucket/{dataset}'}\ncluster: {experiment: mine}\n")


@pytest.fixture
def server():
    with running(KfpServer(token=TOKEN)) as kfp:
        yield kfp


@pytest.fixture
def csc(capsys):
    """Run a command; return its exit code, its lines and its error line, none of which may hold a secret."""

    def run(*words):
        code = main([str(word) for word in words])
        said = capsys.readouterr()
        for secret in (TOKEN, COOKIE, COOKIE.partition("=")[2]):
            assert secret not in said.out + said.err
        return code, said.out.splitlines(), said.err.strip()

    return run


def submit(kfp, *more, scenario=SCENARIO):
    return ("submit", scenario, "--host", kfp.host, "--profile", "mine.yaml", "--token-env", "MY_TOKEN", *more)


def test_submit_makes_experiment_pipeline_version_and_run_and_prints_the_address(server, csc):
    code, lines, error = csc(*submit(server, "--seed", 7, "--method", "lwf"))
    assert (code, error) == (0, "")
    (run,) = server.runs.values()
    assert lines == [
        "digits-b0c4: 10 classes in 3 tasks (4 + 4 + 2); the last task is smaller, with 2 of 4 classes",
        "experiment  mine (made)",
        lines[2],
        f"run         {server.host}/#/runs/details/{run['run_id']}",
        f"status      csc status {run['run_id']} --host {server.host}",
    ]
    assert re.fullmatch(r"pipeline    csc-digits-b0c4 · version [0-9a-f]{16} \(uploaded\)", lines[2])
    assert run["display_name"] == "digits-b0c4 lwf seed 7"
    parameters = run["runtime_config"]["parameters"]
    assert parameters["data"] == "s3://bucket/digits"
    assert {key: json.loads(parameters["config"])[key] for key in ("method", "seed")} == {"method": "lwf", "seed": 7}


def test_submitting_the_same_again_reuses_experiment_pipeline_and_version(server, csc):
    csc(*submit(server))
    _, lines, _ = csc(*submit(server))
    assert lines[1].endswith("(was there)")
    assert lines[2].endswith("(reused)")
    assert [len(shelf) for shelf in (server.experiments, server.pipelines, server.versions, server.runs)] == [
        1,
        1,
        1,
        2,
    ]


def test_another_pipeline_of_the_same_scenario_is_another_version(server, csc):
    csc(*submit(server))
    _, lines, _ = csc(*submit(server, "--tasks", "2-"))
    assert lines[2].endswith("(uploaded)")
    assert (len(server.pipelines), len(server.versions)) == (1, 2)
    assert [run["display_name"] for run in server.runs.values()][1] == "digits-b0c4 csc seed 0 tasks 2-3"


def test_flags_come_before_the_profile(server, csc):
    csc(*submit(server, "--experiment", "other", "--data", "/mnt/elsewhere"))
    assert [one["display_name"] for one in server.experiments.values()] == ["other"]
    (run,) = server.runs.values()
    assert run["runtime_config"]["parameters"]["data"] == "/mnt/elsewhere"


def test_the_profile_may_name_the_host_and_the_account(server, csc, tmp_path):
    cluster = f"cluster: {{host: '{server.host}', service_account: runner}}"
    (tmp_path / "mine.yaml").write_text(f"storage: {{data: /mnt/d}}\n{cluster}\n")
    code, _, error = csc("submit", SCENARIO, "--profile", "mine.yaml", "--token-env", "MY_TOKEN")
    assert (code, error) == (0, "")
    (run,) = server.runs.values()
    assert run["service_account"] == "runner"


def test_where_kubeflow_has_many_users_everything_is_in_the_namespace(server, csc):
    server.multi_user = True
    code, _, error = csc(*submit(server, "--namespace", "team"))
    assert (code, error) == (0, "")
    for shelf in (server.experiments, server.pipelines):
        assert [one["namespace"] for one in shelf.values()] == ["team"]
    _, lines, _ = csc(*submit(server, "--namespace", "team"))
    assert lines[2].endswith("(reused)")
    code, _, error = csc(*submit(server))
    assert code == 2
    assert "refused the request (400): Invalid input error: namespace is empty" in error


def test_a_cookie_works_as_well_as_a_token(csc):
    with running(KfpServer(cookie=COOKIE)) as server:
        words = [word for word in submit(server) if word not in ("--token-env", "MY_TOKEN")]
        assert csc(*words, "--cookie-env", "MY_COOKIE")[0] == 0


def test_inside_a_cluster_the_pods_token_is_used_and_read_again_for_every_request(server, csc, tmp_path, monkeypatch):
    file = tmp_path / "token"
    monkeypatch.setenv(TOKEN_VARIABLE, str(file))
    words = [word for word in submit(server) if word not in ("--token-env", "MY_TOKEN")]
    assert csc(*words)[2] == f"csc: {file}: the token cannot be read; {TOKEN_VARIABLE} may name another file"
    file.write_text(f"{TOKEN}\n")
    assert csc(*words)[0] == 0
    file.write_text("expired")
    assert "not logged in (401)" in csc(*words)[2]


def test_wait_tells_each_change_once_in_the_words_of_a_local_run(server, csc):
    code, lines, error = csc(*submit(server, "--wait", "--tasks", "2-"))
    assert (code, error) == (0, "")
    changes = [line[10:] for line in lines if re.match(r"\d\d:\d\d:\d\d  ", line)]
    per_task = ("split-labels", "build-dataset", "train", "evaluate", "register")
    titles = ["ingest", "prior", *(f"task {task} · {step}" for task in (2, 3) for step in per_task), "report"]
    states = ("running", "succeeded after 60 s")
    assert changes == [f"{title:<24} {state}" for title in titles for state in states]
    assert lines[-1] == "run succeeded after 14 min"


def test_a_run_that_fails_ends_with_code_1_and_the_step(server, csc):
    server.fails_at = ("train", 2)
    code, lines, _ = csc(*submit(server, "--wait"))
    assert code == 1
    assert lines[-2].endswith("task 2 · train           failed after 60 s")
    assert lines[-1] == "run failed after 10 min at task 2 · train: exit code 1"


def test_wait_outlasts_a_server_that_goes_away_for_a_while(server, csc):
    looks = iter(range(1000))

    def now_and_then(method, path):
        if "/runs/" in path and next(looks) % 3:
            raise Refused(503, "upstream connect error")

    server.trouble = now_and_then
    code, lines, _ = csc(*submit(server, "--wait"))
    assert code == 0
    assert lines[-1].startswith("run succeeded")


def test_wait_ends_when_the_token_has_expired_and_says_that_the_run_goes_on(server, csc):
    looks = iter(range(1000))

    def expires(method, path):
        if "/runs/" in path and next(looks) > 3:
            server.token = "another"

    server.trouble = expires
    code, _, error = csc(*submit(server, "--wait"))
    assert code == 2
    assert "not logged in (401)" in error
    assert error.endswith(f"the run goes on: csc status {next(iter(server.runs))} --host {server.host}")


def test_wait_gives_up_on_a_server_that_stays_away(server, csc, monkeypatch):
    monkeypatch.setattr(watch, "PATIENCE", 3)
    server.trouble = lambda method, path: (
        (_ for _ in ()).throw(Refused(502, "Bad Gateway")) if "/runs/" in path else None
    )
    code, _, error = csc(*submit(server, "--wait"))
    assert code == 2
    assert "the server failed (502): Bad Gateway" in error
    assert "the run goes on" in error


def test_a_watcher_who_leaves_is_told_how_to_look_again(server, csc, monkeypatch):
    def leave(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(watch, "follow", leave)
    code, _, error = csc(*submit(server, "--wait"))
    assert code == 130
    assert (
        error == f"csc: no longer watching; the run goes on: csc status {next(iter(server.runs))} --host {server.host}"
    )


def test_status_shows_the_steps_so_far_by_id_or_address(server, csc):
    csc(*submit(server, "--tasks", "3"))
    (run_id,) = server.runs
    words = ("--host", server.host, "--token-env", "MY_TOKEN")
    for _ in range(3):
        csc("status", run_id, *words)
    code, lines, _ = csc("status", f"{server.host}/#/runs/details/{run_id}", *words)
    assert code == 0
    assert lines == [
        "digits-b0c4 csc seed 0 tasks 3",
        "ingest                   succeeded after 60 s",
        "prior                    succeeded after 60 s",
        "task 3 · split-labels    succeeded after 60 s",
        "task 3 · build-dataset   running",
        "run running",
        f"{server.host}/#/runs/details/{run_id}",
    ]


def test_status_of_a_failed_run_is_code_1(server, csc):
    server.fails_at = ("ingest", 1)
    csc(*submit(server, "--wait"))
    code, lines, _ = csc("status", next(iter(server.runs)), "--host", server.host, "--token-env", "MY_TOKEN")
    assert code == 1
    assert lines[-2] == "run failed after 2 min at ingest: exit code 1"


def test_pages_may_be_on_another_host(server, csc, monkeypatch):
    monkeypatch.setenv("KF_PIPELINES_UI_ENDPOINT", "https://kubeflow.example.com/pipeline")
    _, lines, _ = csc(*submit(server))
    assert lines[3].startswith("run         https://kubeflow.example.com/pipeline/#/runs/details/")


def refusing(status, message):
    def trouble(method, path):
        raise Refused(status, message)

    return trouble


@pytest.mark.parametrize(
    ("trouble", "said"),
    [
        (refusing(401, "no valid user identity"), "not logged in (401); name the variable that holds a valid token"),
        (refusing(403, "user x cannot create runs"), "not allowed (403): user x cannot create runs; check the token"),
        (refusing(404, "Not Found"), "not found (404): Not Found; check --host"),
        (refusing(409, "Already exist error"), "refused the request (409): Already exist error"),
        (refusing(500, "InternalServerError: database is locked"), "the server failed (500): InternalServerError"),
        (refusing(503, "first line\nsecond line"), "the server failed (503): first line second line; try again"),
        (refusing(400, "x" * 5000), "refused the request (400): xxx"),
        (refusing(403, f"Bearer {TOKEN} is not known"), "not allowed (403): … is not known"),
        (lambda *_: (200, "text/html", "<html>Log in</html>"), "answers with a page for people, not with the API"),
        (lambda *_: (502, "text/html", "<html>Bad gateway</html>"), "the server failed (502): Bad Gateway"),
        (lambda *_: (200, "application/json", "{"), "its answer is not one of Kubeflow Pipelines v2beta1"),
        (lambda *_: (200, "application/json", "[]"), "its answer is not one of Kubeflow Pipelines v2beta1"),
    ],
    ids=range(12),
)
def test_errors_of_the_endpoint_are_one_clear_line(server, csc, trouble, said):
    server.trouble = trouble
    for words in (submit(server), ("status", "some-run", "--host", server.host, "--token-env", "MY_TOKEN")):
        code, _, error = csc(*words)
        assert code == 2
        assert error.startswith(f"csc: {server.host}: ")
        assert said in error
        assert len(error.splitlines()) == 1
        assert len(error) < 600


def test_no_run_of_that_name(server, csc):
    code, _, error = csc("status", "nothing", "--host", server.host, "--token-env", "MY_TOKEN")
    assert code == 2
    assert "not found (404): ResourceNotFoundError: nothing not found; check --host and the run's id" in error


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], "where to? give --host"),
        (["--host", "kubeflow"], "--host: expected an address such as https://host/pipeline"),
        (["--host", "ftp://kubeflow"], "--host: expected an address"),
        (["--host", f"https://me:{TOKEN}@kubeflow"], "--host: expected an address"),
        (["--host", "http://[bad"], "http://[bad: nothing answers there"),
        (["--host", "http://127.0.0.1:99999"], "http://127.0.0.1:99999: nothing answers there"),
        (["--host", f"http://127.0.0.1:{free_port()}"], "nothing answers there; check --host and the network"),
        (["--host", "http://no-such-host.invalid"], "http://no-such-host.invalid: no such host; check --host"),
        (["--host", "http://h", "--token-env", "UNSET"], "--token-env UNSET: there is no such environment variable"),
        (["--host", "http://h", "--token-env", "BROKEN"], "--token-env BROKEN: empty, or more than one line"),
        (["--host", "http://h", "--cookie-env", "BROKEN"], "--cookie-env BROKEN: empty, or more than one line"),
    ],
    ids=range(11),
)
def test_an_endpoint_that_cannot_be_reached_is_one_clear_line(csc, monkeypatch, flags, said):
    monkeypatch.setenv("BROKEN", f"{TOKEN}\nand more")
    for words in (("submit", SCENARIO, "--profile", "mine.yaml"), ("status", "some-run")):
        code, _, error = csc(*words, *flags)
        assert code == 2
        assert said in error
        assert len(error.splitlines()) == 1


def test_a_server_that_takes_connections_and_never_answers(csc, monkeypatch):
    monkeypatch.setattr(endpoint, "_TIMEOUT", (1, 0.2))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        code, _, error = csc("status", "some-run", "--host", f"http://127.0.0.1:{silent.getsockname()[1]}")
    assert code == 2
    assert error.endswith(": no answer in time; check --host and the network")


def test_a_server_that_does_not_speak_https(csc):
    with running(KfpServer()) as server:
        code, _, error = csc("status", "some-run", "--host", server.host.replace("http:", "https:"))
    assert code == 2
    assert "no safe connection" in error


def test_a_server_that_hangs_up(csc):
    with socket.create_server(("127.0.0.1", 0)) as rude:
        thread = threading.Thread(target=lambda: [rude.accept()[0].close() for _ in range(2)], daemon=True)
        thread.start()
        code, _, error = csc("status", "some-run", "--host", f"http://127.0.0.1:{rude.getsockname()[1]}")
    assert code == 2
    assert "nothing answers there" in error


@pytest.mark.parametrize("profile", ["kubeflow", "kubeflow-airgapped"])
def test_a_profile_that_is_still_an_example_is_not_sent(server, csc, profile):
    code, _, error = csc("submit", SCENARIO, "--host", server.host, "--profile", profile)
    assert code == 2
    assert f"profiles/{profile}.yaml: images.cpu is an example; copy the file" in error
    assert server.calls == []


def test_data_must_be_known(server, csc, tmp_path):
    (tmp_path / "mine.yaml").write_text("gpu: {count: 1}")
    assert "--data is missing, and the profile has no storage.data" in csc(*submit(server))[2]
    error = csc(*submit(server, "--data", "/mnt/nowhere", scenario="mine-b0c2"))[2]
    assert "/mnt/nowhere" in error
    assert (
        "--data work/digits: expected a place that the cluster knows"
        in csc(*submit(server, "--data", "work/digits"))[2]
    )
    assert server.calls == []


def test_the_server_of_these_tests_refuses_arguments_that_the_pipeline_does_not_declare(server, csc, tmp_path):
    (tmp_path / "mine.yaml").write_text("gpu: {count: 1}")  # no default place of the data
    csc(*submit(server, "--data", "/mnt/d"))
    (version,) = server.versions.values()
    spec = version["pipeline_spec"]["pipeline_spec"]
    good = {"data": "/mnt/d", "gpus": 2}
    check_arguments(spec, good)
    for bad in ({}, {**good, "epochs": 3}, {**good, "gpus": "2"}, {**good, "data": 1}, {**good, "gpus": True}):
        with pytest.raises(Refused):
            check_arguments(spec, bad)


def test_the_server_of_these_tests_refuses_a_pipeline_with_an_unknown_field(server, csc, monkeypatch):
    from csc.pipelines import scenario

    honest = scenario.compile_pipeline

    def with_surprise(*arguments):
        honest(*arguments)
        documents = list(yaml.safe_load_all(arguments[2].read_text()))
        documents[0]["surprise"] = 1
        arguments[2].write_text(yaml.safe_dump_all(documents))

    monkeypatch.setattr(scenario, "compile_pipeline", with_surprise)
    code, _, error = csc(*submit(server))
    assert code == 2
    assert "refused the request (400): Failed to parse the pipeline" in error


def test_steps_that_run_side_by_side_are_counted_without_a_task():
    def task(component):
        return {"componentRef": {"name": component}, "taskInfo": {"name": component}}

    spec = {
        "root": {"dag": {"tasks": {"for-loop-1": task("loop"), "collect": task("step")}}},
        "components": {
            "loop": {"dag": {"tasks": {"scenario": task("scenario")}}},
            "scenario": {"dag": {"tasks": {"train": task("step")}}},
            "step": {"executorLabel": "some"},
        },
    }
    details = [
        kfp_server_api.V2beta1PipelineTaskDetail(
            display_name=name, state=state, start_time=datetime(2026, 1, day, tzinfo=UTC)
        )
        for name, state, day in [
            ("collect", "PENDING", 4),
            ("train", "RUNNING", 3),
            ("scenario", "RUNNING", 1),
            ("train-driver", "SUCCEEDED", 1),
            ("train", "SUCCEEDED", 2),
        ]
    ]
    run = kfp_server_api.V2beta1Run(run_details=kfp_server_api.V2beta1RunDetails(task_details=details))
    found = [(step.title, step.state) for step in steps_of(run, spec)]
    assert found == [("train (1)", "SUCCEEDED"), ("train (2)", "RUNNING"), ("collect", "PENDING")]


@pytest.mark.parametrize(
    ("seconds", "said"), [(0, "0 s"), (119, "119 s"), (120, "2 min"), (7140, "119 min"), (7200, "2 h 0 min")]
)
def test_times_as_people_say_them(seconds, said):
    assert duration(seconds) == said


def study(kfp, *more, name="digits"):
    words = ("--host", kfp.host, "--profile", "mine.yaml", "--token-env", "MY_TOKEN", "--seeds", "0")
    return ("study", name, "--submit", *words, *more)


def test_a_study_is_submitted_as_one_run_of_its_own_pipeline(server, csc):
    code, lines, error = csc(*study(server, "--methods", "csc,lwf"))
    assert (code, error) == (0, "")
    (run,) = server.runs.values()
    assert run["display_name"] == "All methods on the embedded digits, 2 runs"
    assert re.fullmatch(r"pipeline    csc-study-digits · version [0-9a-f]{16} \(uploaded\)", lines[1])
    assert lines[2] == f"run         {server.host}/#/runs/details/{run['run_id']}"


def test_a_study_too_large_for_a_cluster_is_several_runs_of_one_pipeline(server, csc, monkeypatch):
    monkeypatch.setattr("csc.pipelines.study.parts.__defaults__", (30,))  # steps; a cell on digits has 27
    code, lines, _ = csc(*study(server, "--methods", "csc,lwf"))
    assert code == 0
    assert lines[0].startswith("2 pipelines, because")
    assert [len(shelf) for shelf in (server.pipelines, server.versions, server.runs)] == [1, 2, 2]


@pytest.mark.parametrize(
    ("words", "right"),
    [
        (("--data", "data/digits"), "--data data/digits: expected a place that the cluster knows"),
        (("--profile", "kubeflow"), "images.cpu is an example"),
        (("--methods", "nobody"), "nobody"),
    ],
)
def test_a_study_that_cannot_run_there_is_not_sent(server, csc, words, right):
    code, _, error = csc(*study(server), *words)
    assert code == 2
    assert right in error
    assert not server.runs
    assert not server.pipelines


def test_looking_at_a_study_submits_nothing(server, csc):
    with pytest.raises(SystemExit, match="2"):
        csc(*study(server, "--dry-run"))
    assert not server.runs
