"""Profiles are read strictly: what is wrong is one line with the file and the key."""

import os
import re
import sys
from pathlib import Path

import msgspec
import pytest
import yaml

from csc.cli import main
from csc.components.image import CPU_IMAGE
from csc.data.ingest.coco import ingest_coco
from csc.errors import BadConfig
from csc.pipelines.profile import SHIPPED, Profile, Retry, on_this_machine, read_profile, run_defaults
from csc.retry import Retries
from csc.scenario import Scenario
from tests.builders import make_coco
from tests.faults.starter import finished

FOLDER = Path(__file__).parents[2] / "pipelines" / "profiles"
DOCS = Path(__file__).parents[2] / "docs" / "profiles.md"
DEPLOY = Path(__file__).parents[2] / "deploy"


def keys_of(value, path=""):
    """The dotted keys of a profile, down to plain values."""
    for item in msgspec.structs.fields(value):
        inner = getattr(value, item.name)
        if isinstance(inner, msgspec.Struct):
            yield from keys_of(inner, f"{path}{item.name}.")
        else:
            yield f"{path}{item.name}"


@pytest.fixture
def written(tmp_path):
    """Write a profile and return its name."""

    def write(text):
        path = tmp_path / "mine.yaml"
        path.write_text(text)
        return str(path)

    return write


def test_three_profiles_are_shipped_and_readable():
    assert sorted(SHIPPED) == ["kubeflow", "kubeflow-airgapped", "local"]
    assert all(isinstance(read_profile(name), Profile) for name in SHIPPED)


def test_no_profile_at_all_is_the_local_one(written):
    assert read_profile("local") == Profile() == read_profile(written("# nothing yet\n"))


def test_the_annotated_profile_shows_every_key():
    content = yaml.safe_load((FOLDER / "kubeflow.yaml").read_text())
    for key in keys_of(Profile()):
        node = content
        for name in key.split("."):
            assert name in node, key
            node = node[name]


def test_the_documentation_explains_every_key_and_no_other():
    section = DOCS.read_text().partition("## Keys")[2].partition("\n## ")[0]
    explained = set(re.findall(r"^\| `([a-z_0-9.]+)` \|", section, re.MULTILINE))
    per_pod = {"requests.cpu", "requests.memory", "limits.cpu", "limits.memory"}
    per_pod |= {"node_selector", "tolerations", "timeout"}
    expected = {key for key in keys_of(Profile()) if not key.startswith(("train.", "cpu."))}
    assert explained == expected | {f"train.{key}" for key in per_pod}  # cpu has the same


@pytest.mark.parametrize("name", ["kubeflow", "kubeflow-airgapped"])
def test_the_shipped_manifests_make_what_the_profile_names(name):
    profile = read_profile(name)
    documents = [one for file in DEPLOY.glob("*.yaml") for one in yaml.safe_load_all(file.read_text())]
    made = {(one["kind"], one.get("metadata", {}).get("name")): one for one in documents}
    assert ("PersistentVolumeClaim", profile.storage.volume.claim) in made
    assert profile.tracking.uri == "http://mlflow.csc.svc.cluster.local:5000"
    assert {("Service", "mlflow"), ("Namespace", "csc")} <= made.keys()
    for secret in (profile.secrets.s3, profile.secrets.mlflow):
        assert not secret.name or secret.keys.keys() <= made["Secret", secret.name]["stringData"].keys()


def test_a_file_is_read_where_it_differs_from_the_defaults(written):
    name = written("gpu: {count: 4}\ntrain:\n  tolerations:\n    - {key: gpu}\nretry: {factor: 3}\ncpu:\n")
    profile = read_profile(name)
    assert (profile.gpu.count, profile.gpu.resource) == (4, "nvidia.com/gpu")
    assert profile.train.tolerations[0].operator == "Exists"
    assert profile.retry.factor == 3.0
    assert profile.cpu == Profile().cpu  # a key without a value counts as left out
    assert profile.images.cpu == CPU_IMAGE


WRONG = [
    ("gpus: 1", "gpus: no such key; choose one of images, user, gpu"),
    ("gpu: {counts: 1}", "gpu.counts: no such key; choose one of gpu.resource, gpu.count"),
    ("gpu: {count: two}", "gpu.count=two: expected a whole number between 0 and 1000"),
    ("gpu: {count: 1.0}", "gpu.count=1.0: expected a whole number between 0 and 1000"),
    ("gpu: {count: true}", "gpu.count=True: expected a whole number between 0 and 1000"),
    ("gpu: {count: -1}", "gpu.count=-1: expected a whole number between 0 and 1000"),
    ("gpu: 1", "gpu: expected a group of resource, count"),
    ("- gpu", "the file: expected a group of images"),
    ("gpu: {count: 1}\ngpu: {count: 2}", "in line 2 ('gpu' is there twice)"),
    ("gpu: {count: 1", "not readable as YAML in line"),
    ("gpu: !!python/object/apply:os.getcwd []", "not readable as YAML"),
    ("caching: sometimes", "caching=sometimes: expected true or false"),
    (
        "train: {requests: {cpu: 8}}",
        'train.requests.cpu=8: expected an amount of CPUs such as 4, 0.5 or 500m; put it in quotes: "8"',
    ),
    ("train: {requests: {cpu: eight}}", "train.requests.cpu=eight: expected an amount of CPUs such as 4"),
    ("cpu: {limits: {memory: 16GB}}", "cpu.limits.memory=16GB: expected an amount of memory such as 16Gi"),
    ("shm_size: lots", "shm_size=lots: expected an amount of memory"),
    ("train: {tolerations: {key: gpu}}", "train.tolerations=a group: expected a list"),
    ("train: {tolerations: [{effect: No}]}", "train.tolerations[0].effect=False: expected one of NoSchedule"),
    ("train: {tolerations: [{key: a, value: b}]}", "train.tolerations[0]: a value needs the operator Equal"),
    ("train: {node_selector: {gpu: 1}}", "train.node_selector.gpu=1: expected text"),
    ("train: {timeout: 1 day}", "train.timeout=1 day: expected a time such as 90s"),
    ("train: {timeout: 2d}\nretry: {times: 1, within: 1d}", "retry.within: 1d is less than train.timeout, 2d"),
    ("train: {timeout: 2d}\nretry: {pods: 1, within: 1d}", "retry.within: 1d is less than train.timeout, 2d"),
    ("retry: {factor: 0.5}", "retry.factor=0.5: expected a number between 1 and 100"),
    ("retry: {pods: -1}", "retry.pods=-1: expected a whole number between 0 and 1000"),
    (
        "retry: {times: 2}\nenv: {CSC_RETRY_TIMES: '5'}",
        "env, secrets, tracking, retry: the variable CSC_RETRY_TIMES is",
    ),
    ("images: {cpu: 'two words'}", "images.cpu=two words: expected an image such as"),
    ("images: {train: 'csc@sha256:12'}", "images.train=csc@sha256:12: expected an image such as"),
    ("images: {pull_policy: often}", "images.pull_policy=often: expected one of Always, IfNotPresent, Never"),
    ("images: {pull_secrets: [A B]}", "images.pull_secrets[0]=A B: expected the name of a Kubernetes object"),
    ("storage: {data: data/voc}", "storage.data=data/voc: expected a uri such as s3://bucket/data/{dataset}"),
    ("storage: {data: 's3://b/{name}'}", "storage.data=s3://b/{name}: expected a uri"),
    ("storage: {checkpoints: s3://b/c}", "storage.checkpoints=s3://b/c: expected a folder inside the containers"),
    ("storage: {checkpoints: /mnt/c}", "storage.checkpoints: checkpoints outlive a pod only on a volume"),
    ("storage: {volume: {path: mnt}}", "storage.volume.path=mnt: expected a folder"),
    ("secrets: {s3: {name: my-keys}}", "secrets.s3: needs both a name and keys"),
    ("secrets: {s3: {name: a, keys: {k: 'A-B'}}}", "secrets.s3.keys.k: expected the name of an environment variable"),
    ("env: {AWS_SECRET_ACCESS_KEY: hunter2}", "env.AWS_SECRET_ACCESS_KEY: a profile holds no secrets"),
    ("env: {MLFLOW_TRACKING_PASSWORD: hunter2}", "env.MLFLOW_TRACKING_PASSWORD: a profile holds no secrets"),
    ("env: {HF_TOKEN: hunter2}", "env.HF_TOKEN: a profile holds no secrets"),
    ("env: {PGPASSWORD: hunter2}", "env.PGPASSWORD: a profile holds no secrets; put it into a Kubernetes secret"),
    ("env: {WANDB_API_KEY: hunter2}", "env.WANDB_API_KEY: a profile holds no secrets"),
    ("env: {minio_secretkey: hunter2}", "env.minio_secretkey: a profile holds no secrets"),
    ("env: {AZURE_STORAGE_CONNECTION_STRING: hunter2}", "env.AZURE_STORAGE_CONNECTION_STRING: a profile holds no"),
    ("env: {MLFLOW_TRACKING_URI: 'http://anna:hunter2@mlflow'}", "env.MLFLOW_TRACKING_URI: an address with a login in"),
    ("env: {DB_PASS: hunter2}", "env.DB_PASS: a profile holds no secrets"),
    ("env: {GITHUB_PAT: hunter2}", "env.GITHUB_PAT: a profile holds no secrets"),
    (f"env: {{A: AKIA{'HUNTER' * 2}ABCD}}", "env.A: the id of an AWS key; a profile holds no secrets"),
    (f"env: {{A: {'hunterA9/+' * 4}}}", "env.A: an AWS secret key; a profile holds no secrets"),
    (f"env: {{A: ghp_{'hunter' * 6}}}", "env.A: a token of GitHub or GitLab; a profile holds no secrets"),
    (f"env: {{A: hf_{'hunter' * 6}}}", "env.A: a token of Hugging Face"),
    ("env: {A: xoxb-hunter-hunter-2}", "env.A: a token of Slack"),
    ("env: {A: 'Bearer eyJodW50ZXI.eyJodW50ZXI.hunter'}", "env.A: a JSON web token"),
    ('env: {A: "-----BEGIN RSA PRIVATE KEY-----\\nhunter"}', "env.A: a private key; a profile holds no secrets"),
    (f"cluster: {{experiment: ghp_{'hunter' * 6}}}", "cluster.experiment: a token of GitHub or GitLab"),
    (f"train: {{node_selector: {{a: ghp_{'hunter' * 6}}}}}", "train.node_selector.a: a token of GitHub"),
    ("env: {AWS_ENDPOINT_URL_S3: 'https://anna:hunter2@s3'}", "env.AWS_ENDPOINT_URL_S3: an address with a login in it"),
    ("env: {MLFLOW_TRACKING_URI: 'http://a'}\ntracking: {uri: 'http://b'}", "MLFLOW_TRACKING_URI is set twice"),
    ("env: {A B: c}", "env.A B: expected the name of an environment variable"),
    ("env: {A: 1}", "env.A: expected text; put it in quotes"),
    ("tracking: {uri: 'http://me:hunter2@host'}", "tracking.uri: expected an address such as http://host:port"),
    ("cluster: {namespace: My Space}", "cluster.namespace=My Space: expected the name of a Kubernetes object"),
    ("user: {uid: -1}", "user.uid=-1: expected a whole number between 0 and 2147483647"),
    ("user: {uid: .inf}", "user.uid=inf: expected a whole number"),
    ("user: {uid: 0x" + 5000 * "f" + "}", "user.uid=a huge number: expected a whole number"),
    ("retry: {factor: .nan}", "retry.factor=nan: expected a number"),
    ("images: {cpu: [csc]}", "images.cpu=a list: expected an image such as"),
    ('images: {cpu: "two\\nlines"}', r"images.cpu='two\nlines': expected an image such as"),
    ("images: " + 100_000 * "[", "not readable as YAML in line 1 (too many groups within groups)"),
    ("env: {A: [hunter2]}", "env.A: expected text"),
    ("secrets: {s3: hunter2}", "secrets.s3: expected a group of name, keys"),
    ("secrets: {s3: {name: a, keys: {password: hunter-2!}}}", "secrets.s3.keys.password: expected the name of an env"),
    ("cpu: {}\nlight: {}", "light: is now called cpu, which is there too; leave out light"),
    ("study: {parallelism: 0}", "study.parallelism=0: expected a whole number between 1 and 1000"),
]


@pytest.mark.parametrize(("text", "said"), WRONG, ids=[text.replace("\n", "; ")[:60] for text, _ in WRONG])
def test_what_is_wrong_is_one_line_with_file_and_key(written, text, said):
    name = written(text)
    with pytest.raises(BadConfig) as error:
        read_profile(name)
    line = str(error.value)
    assert line.startswith(f"{name}: ")
    assert said in line
    assert "\n" not in line
    assert "hunter" not in line


def test_keys_that_were_renamed_are_read_with_a_hint(written, capsys):
    name = written("heavy: {timeout: 1h}\nlight: {requests: {cpu: '2'}}\n")
    profile = read_profile(name)
    assert (profile.train.timeout, profile.cpu.requests.cpu) == ("1h", "2")
    said = capsys.readouterr().err.splitlines()
    names = (f"{name}: heavy is now called train", f"{name}: light is now called cpu")
    assert said == [f"note: {line}; the next version will refuse the old name" for line in names]


@pytest.mark.parametrize("words", [["run"], ["compile", "-o", "x.yaml"], ["submit"]], ids=lambda words: words[0])
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--profile", "nowhere"], "--profile nowhere: no such file; give a YAML file or one of kubeflow"),
        (["--tasks", "4-9"], "--tasks 4-9: scenario 'digits-b0c4' has tasks 1 to 3"),
        (["--tasks", "2-1"], "--tasks 2-1: scenario 'digits-b0c4' has tasks 1 to 3"),
        (["--tasks", "all"], "--tasks all: expected the numbers of tasks, for instance 2-4"),
        (["--tasks", "-"], "--tasks -: expected the numbers of tasks"),
    ],
    ids=str,
)
def test_commands_refuse_before_anything_is_written(words, flags, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "")
    (tmp_path / "mine.yaml").write_text("storage: {data: /mnt/digits}")
    profile = [] if "--profile" in flags else ["--profile", "mine.yaml"]
    assert main([words[0], "digits-b0c4", *words[1:], *profile, *flags]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line
    assert [path.name for path in tmp_path.iterdir()] == ["mine.yaml"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TOKENIZERS_PARALLELISM", "false"),
        ("AWS_WEB_IDENTITY_TOKEN_FILE", "/some/file"),
        ("KF_PIPELINES_SA_TOKEN_PATH", "/some/file"),
        ("GOOGLE_APPLICATION_CREDENTIALS", "/some/file"),
        ("AWS_ENDPOINT_URL_S3", "http://seaweedfs:9000/some@path"),
        ("CONTACT", "anna@example.com"),
    ],
)
def test_a_variable_that_only_looks_like_a_secret_may_be_set(written, name, value):
    assert read_profile(written(f"env: {{{name}: '{value}'}}")).env == {name: value}


def test_the_default_data_are_those_of_the_scenarios_data_set():
    voc = Scenario.parse("voc-b0c4")
    assert run_defaults(read_profile("kubeflow"), voc) == {
        "data": "s3://csc/data/voc",
        "checkpoints": "/mnt/csc/checkpoints",
        "gpus": "1",
    }
    assert run_defaults(Profile(), voc) == {"gpus": "1"}


def test_the_retries_of_a_profile_are_those_of_its_steps(written, monkeypatch):
    retry = read_profile(written("retry: {times: 3, wait: 2m, factor: 1.5, within: 12h}")).retry
    for name, value in retry.environment().items():
        monkeypatch.setenv(name, value)
    assert Retries.from_environment() == Retries(times=3, wait=120, factor=1.5, within=12 * 3600)
    assert read_profile(written("retry: {wait: 2m}")).retry.environment() == {}


def test_no_pod_is_tried_again_on_this_machine():
    profile = Profile(retry=Retry(times=2, pods=3))
    assert on_this_machine(profile) == Profile(retry=Retry(times=2))


@pytest.mark.slow
@pytest.mark.parametrize("runner", ["subprocess", "forked"])
def test_refused_input_ends_a_local_run_at_once_whatever_the_profile_says_of_retries(written, tmp_path, runner):
    data = ingest_coco(make_coco(tmp_path / "raw"), tmp_path / "set", "animals").path
    (data / "labels.parquet").write_bytes(b"nonsense")
    words = ["run", "animals-b0c2", "--data", data, "--workdir", tmp_path / "work", "--set", "init=scratch"]
    words += ["--runner", runner, "--profile", written("retry: {times: 2, pods: 2, wait: 1s, factor: 1}")]
    hidden = ("MLFLOW_TRACKING_URI", "MLFLOW_RUN_ID")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    done = finished([sys.executable, "-m", "csc", *map(str, words)], environment)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "labels.parquet: not readable" in done.stderr
    assert done.stdout.count("build-dataset") == 1
    assert "retry: " not in done.stdout
