"""Submitting to a cluster, over HTTP, to a server that checks what it is sent."""

import contextlib
import json
import re
import socket
import threading

import pytest
import yaml

from csc.pipelines.cluster import endpoint, run
from csc.pipelines.cluster.endpoint import TOKEN_VARIABLE
from tests.kfp_server import COOKIE, TOKEN, KfpServer, Refused, check_arguments, running

pytest_plugins = ["tests.cluster"]
pytestmark = pytest.mark.usefixtures("machine")

SCENARIO = "digits-b0c4"  # three tasks


def submit(kfp, *more, scenario=SCENARIO):
    return ("submit", scenario, "--host", kfp.host, "--profile", "mine.yaml", "--token-env", "MY_TOKEN", *more)


def test_submit_makes_experiment_pipeline_version_and_run_and_prints_the_address(server, csc):
    code, lines, error = csc(*submit(server, "--seed", 7, "--method", "lwf", "--set", "train.epochs=3"))
    assert (code, error) == (0, "")
    (run,) = server.runs.values()
    assert lines == [
        "digits-b0c4: 10 classes in 3 tasks (4 + 4 + 2); the last task is smaller, with 2 of 4 classes",
        "experiment  mine (made)",
        lines[2],
        f"run         {server.host}/#/runs/details/{run['run_id']}",
        f"status      csc status {run['run_id']} --profile mine.yaml --host {server.host} --token-env MY_TOKEN",
        f"stop        csc stop {run['run_id']} --profile mine.yaml --host {server.host} --token-env MY_TOKEN",
    ]
    assert re.fullmatch(r"pipeline    csc-digits-b0c4 · version [0-9a-f]{16} \(uploaded\)", lines[2])
    assert run["display_name"] == "digits-b0c4 · lwf · train.epochs=3 · seed 7"
    parameters = run["runtime_config"]["parameters"]
    assert parameters["data"] == "s3://bucket/digits"
    assert json.loads(parameters["config"]) == {"method": "lwf", "seed": 7, "train": {"epochs": 3}}


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
    assert [run["display_name"] for run in server.runs.values()][1] == "digits-b0c4 · csc · seed 0 · tasks 2-3"


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


def test_wait_reports_each_change_once_in_the_words_of_a_local_run(server, csc):
    code, lines, error = csc(*submit(server, "--wait", "--tasks", "2-"))
    assert (code, error) == (0, "")
    changes = [line[10:] for line in lines if re.match(r"\d\d:\d\d:\d\d  ", line)]
    per_task = ("split-labels", "build-dataset", "train", "evaluate", "register")
    steps = [f"task {task} · {step}" for task in (2, 3) for step in per_task]
    states = ("running", "succeeded after 48 s")
    titles = ["ingest", "prior", *steps, "report", "finish"]
    assert changes == [f"{title:<24} {state}" for title in titles for state in states]
    assert lines[-1] == "run succeeded after 15 min 0 s"


def test_wait_reports_every_try_and_what_was_reused(server, csc):
    server.tries, server.reused = {("train", 2): 2}, {("split-labels", 1), ("build-dataset", 1)}
    code, lines, _ = csc(*submit(server, "--wait"))
    assert code == 0
    changes = [line[10:] for line in lines if " · " in line]
    assert "task 1 · split-labels    reused" in changes
    assert "task 1 · train           succeeded after 48 s" in changes
    assert changes.count("task 2 · train           running, try 2") == 1
    assert "task 2 · train           succeeded after 48 s, try 2" in changes
    assert len(changes) == len(set(changes))


def test_a_run_that_fails_ends_with_code_1_the_step_and_its_log(server, csc):
    server.fails_at = ("train", 2)
    code, lines, _ = csc(*submit(server, "--wait"))
    assert code == 1
    (run_id,) = server.runs
    index = lines.index("run failed after 10 min 0 s at task 2 · train")
    assert "task 2 · train           failed after 48 s" in lines[index - 2]
    pod = server.progress[run_id].workflow.pod(("root", "exit-handler-1", "incremental-task", "train"))
    assert lines[index + 1 :] == [
        f"pod         {pod}",
        f"log         task 2 · train: no log from here ({server.host}: the server failed (500): Failed to read logs "
        f"from pod {pod} due to error fetching the pod; try again, or see its logs); try: "
        f"kubectl -n kubeflow logs {pod} -c main",
    ]


def test_wait_goes_on_when_steps_are_no_longer_named(server, csc):
    server.named_steps = 4
    code, lines, error = csc(*submit(server, "--wait"))
    assert (code, error) == (0, "")
    reported = [line[10:] for line in lines if re.match(r"\d\d:\d\d:\d\d  ", line)]
    assert [line for line in reported if "Kubeflow" in line] == [
        "Kubeflow no longer tells how the steps stand: the workflow has grown over 1 MiB"
    ]
    assert lines[-1] == "run succeeded after 19 min 0 s"


@pytest.mark.parametrize("word", ["status", "stop"])
def test_the_commands_that_are_printed_work_as_they_are(server, csc, word):
    """With the profile's host and namespace, and in another order than typed."""
    _, lines, _ = csc(*submit(server, "--namespace", "team"))
    (hint,) = [line.partition("csc ")[2] for line in lines if line.startswith(word)]
    assert csc(*hint.split())[::2] == (0, "")
    assert "--namespace team" in hint


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
    again = f"--profile mine.yaml --host {server.host} --token-env MY_TOKEN"
    assert error.endswith(f"the run goes on: csc status {next(iter(server.runs))} {again}")


def test_wait_gives_up_on_a_server_that_stays_away(server, csc, monkeypatch):
    monkeypatch.setattr(run, "MAX_FAILURES", 3)
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

    monkeypatch.setattr(run.RemoteRun, "_follow", leave)
    code, _, error = csc(*submit(server, "--wait"))
    assert code == 130
    command = f"csc status {next(iter(server.runs))} --profile mine.yaml --host {server.host} --token-env MY_TOKEN"
    assert error == f"csc: no longer watching; the run goes on: {command}"


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
        (refusing(403, f"{'x' * 290} {TOKEN}"), f"not allowed (403): {'x' * 290} …"),
        (lambda *_: (200, "text/html", "<html>Log in</html>"), "answers with a web page, not with the API"),
        (lambda *_: (502, "text/html", "<html>Bad gateway</html>"), "the server failed (502): Bad Gateway"),
        (lambda *_: (200, "application/json", "{"), "its answer is not one of Kubeflow Pipelines v2beta1"),
        (lambda *_: (200, "application/json", "[]"), "its answer is not one of Kubeflow Pipelines v2beta1"),
        (lambda *_: (200, "application/json", "null"), "its answer is not one of Kubeflow Pipelines v2beta1"),
        (lambda *_: (200, "application/json; charset=klingon", "{}"), "its answer is not one of Kubeflow Pipelines"),
        (refusing(400, "\x1b[31mred\x1b[0m \x07bell \u202eknalb"), "refused the request (400): red bell knalb"),
    ],
    ids=range(16),
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


@pytest.mark.parametrize("identifier", [None, 3, "", "\x1b]0;mine\x07", "a b"])
def test_an_id_that_is_none_is_not_printed(server, csc, identifier):
    server.trouble = lambda *_: (
        200,
        "application/json",
        json.dumps({"run_id": identifier, "experiment_id": identifier}),
    )
    for words in (submit(server), ("status", "some-run", "--host", server.host, "--token-env", "MY_TOKEN")):
        code, lines, error = csc(*words)
        assert code == 2
        assert error == f"csc: {server.host}: its answer is not one of Kubeflow Pipelines v2beta1; check --host"
        assert "\x1b" not in "".join(lines)


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
        ([], "no address of Kubeflow: give --host"),
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
    monkeypatch.setattr(endpoint, "ANSWER_SECONDS", 0.2)
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

        def hang_up():
            with contextlib.suppress(OSError):  # when the test is over
                while True:
                    rude.accept()[0].close()

        threading.Thread(target=hang_up, daemon=True).start()
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
    assert "--data work/digits: expected what the cluster knows" in csc(*submit(server, "--data", "work/digits"))[2]
    assert server.calls == []


def test_the_server_of_these_tests_refuses_arguments_that_the_pipeline_does_not_declare(server, csc, tmp_path):
    (tmp_path / "mine.yaml").write_text("gpu: {count: 1}")  # no default address of the data
    csc(*submit(server, "--data", "/mnt/d"))
    (version,) = server.versions.values()
    spec = version["pipeline_spec"]["pipeline_spec"]
    good = {"data": "/mnt/d", "gpus": "2"}
    check_arguments(spec, good)
    for bad in ({}, {**good, "epochs": 3}, {**good, "gpus": 2}, {**good, "data": 1}, {**good, "gpus": True}):
        with pytest.raises(Refused):
            check_arguments(spec, bad)


def test_the_server_of_these_tests_refuses_a_pipeline_with_an_unknown_field(server, csc, monkeypatch):
    from csc.pipelines import scenario

    honest = scenario.compile_pipeline

    def with_surprise(*arguments, **options):
        honest(*arguments, **options)
        documents = list(yaml.load_all(arguments[2].read_text(), yaml.CSafeLoader))
        documents[0]["surprise"] = 1
        arguments[2].write_text(yaml.dump_all(documents, Dumper=yaml.CSafeDumper))

    monkeypatch.setattr(scenario, "compile_pipeline", with_surprise)
    code, _, error = csc(*submit(server))
    assert code == 2
    assert "refused the request (400): Failed to parse the pipeline" in error


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


@pytest.mark.slow
def test_a_study_too_large_for_a_cluster_is_several_runs_of_one_pipeline(server, csc, monkeypatch):
    monkeypatch.setattr("csc.pipelines.study.split_into_pipelines.__defaults__", (30,))  # steps; a cell has 27
    code, lines, _ = csc(*study(server, "--methods", "csc,lwf"))
    assert code == 0
    assert lines[0].startswith("2 pipelines, because")
    assert [len(shelf) for shelf in (server.pipelines, server.versions, server.runs)] == [1, 2, 2]


@pytest.mark.parametrize(
    ("words", "right"),
    [
        (("--data", "data/digits"), "--data data/digits: expected what the cluster knows"),
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
