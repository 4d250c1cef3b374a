"""The jobs in deploy/ that are run by hand: valid, no part of what is always applied, and in step with the profile."""

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from csc import __version__
from csc.cli import _parser
from csc.pipelines.profile import read_profile

DEPLOY = Path(__file__).parents[2] / "deploy"
JOBS = ("doctor.yaml", "volume-owner.yaml")
VERSIONS = ("1.27", "1.32", "1.36")
PROFILE = read_profile("kubeflow")


def job(name: str) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((DEPLOY / name).read_text())
    return content


def pod(name: str) -> dict[str, Any]:
    spec: dict[str, Any] = job(name)["spec"]["template"]["spec"]
    return spec


def container(name: str) -> dict[str, Any]:
    (only,) = pod(name)["containers"]
    return dict(only)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", JOBS)
def test_a_job_is_valid(name: str, version: str):
    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate, which has the API's schemas")
    validate.validate(job(name), version, strict=True)
    wrong = job(name)
    wrong["spec"]["template"]["spec"]["containers"][0]["enviroment"] = []
    with pytest.raises(validate.ValidationError):
        validate.validate(wrong, version, strict=True)


@pytest.mark.parametrize("name", JOBS)
def test_a_job_is_run_by_hand_once_and_without_rights_in_the_cluster(name: str):
    assert name not in yaml.safe_load((DEPLOY / "kustomization.yaml").read_text())["resources"]
    assert job(name)["spec"]["backoffLimit"] == 0
    assert job(name)["spec"]["ttlSecondsAfterFinished"] > 0
    assert job(name)["spec"]["template"]["metadata"]["annotations"] == {"sidecar.istio.io/inject": "false"}
    assert pod(name)["restartPolicy"] == "Never"
    assert pod(name)["automountServiceAccountToken"] is False
    assert pod(name)["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container(name)["securityContext"]["allowPrivilegeEscalation"] is False
    assert container(name)["securityContext"]["readOnlyRootFilesystem"] is True
    assert {"cpu", "memory"} == set(container(name)["resources"]["requests"])


def test_the_doctor_is_the_user_of_the_steps_with_their_variables():
    allowed = pod("doctor.yaml")["securityContext"]
    assert (allowed["runAsUser"], allowed["runAsGroup"]) == (PROFILE.user.uid, PROFILE.user.gid)
    assert allowed["runAsNonRoot"] is True
    assert container("doctor.yaml")["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    given = container("doctor.yaml")["env"]
    plain = {one["name"]: one["value"] for one in given if "value" in one}
    secret = {one["name"]: one["valueFrom"]["secretKeyRef"] for one in given if "valueFrom" in one}
    assert plain == {"MLFLOW_TRACKING_URI": PROFILE.tracking.uri, **PROFILE.env}
    assert secret == {
        variable: {"name": one.name, "key": key}
        for one in (PROFILE.secrets.s3, PROFILE.secrets.mlflow)
        for key, variable in one.keys.items()
    }


def test_the_doctor_asks_for_the_data_where_the_profile_has_them():
    words = container("doctor.yaml")["command"] + container("doctor.yaml")["args"]
    assert words[0] == "csc"
    arguments = _parser().parse_args(words[1:])
    assert arguments.data == PROFILE.storage.data.replace("{dataset}", "digits")
    assert container("doctor.yaml")["image"].endswith(f"/csc-train:{__version__}")
    mounts = {mount["mountPath"] for mount in container("doctor.yaml")["volumeMounts"]}
    assert mounts == {"/tmp", "/dev/shm"}


def test_the_volume_of_the_steps_is_handed_to_their_user():
    (mount,) = container("volume-owner.yaml")["volumeMounts"]
    (volume,) = pod("volume-owner.yaml")["volumes"]
    assert volume == {"name": mount["name"], "persistentVolumeClaim": {"claimName": PROFILE.storage.volume.claim}}
    assert mount["mountPath"] == PROFILE.storage.volume.path
    assert (
        f"{PROFILE.user.uid}:{PROFILE.user.gid} {mount['mountPath']}" in container("volume-owner.yaml")["command"][-1]
    )
    assert pod("volume-owner.yaml")["securityContext"]["runAsUser"] == 0


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("setpriv"), reason="only root can give files away")
def test_the_capabilities_of_the_owner_are_enough_and_all_needed(tmp_path: Path):
    folder = tmp_path / "volume"
    (folder / "closed").mkdir(parents=True, mode=0o700)
    (folder / "closed" / "file").touch()
    os.chown(folder / "closed", 4242, 4242)
    added = [name.lower() for name in container("volume-owner.yaml")["securityContext"]["capabilities"]["add"]]
    words = [word.replace("/mnt/csc", str(folder)) for word in container("volume-owner.yaml")["command"]]

    def owners(capabilities: list[str]) -> set[int]:
        kept = ",".join(["-all", *(f"+{name}" for name in capabilities)])
        limits = [f"--{kind}={kept}" for kind in ("bounding-set", "inh-caps", "ambient-caps")]
        subprocess.run(["setpriv", *limits, "--no-new-privs", *words], capture_output=True)
        return {path.stat().st_uid for path in (folder, *folder.rglob("*"))}

    for left_out in added:
        assert owners([name for name in added if name != left_out]) != {PROFILE.user.uid}
        os.chown(folder / "closed", 4242, 4242)
    assert owners(added) == {PROFILE.user.uid}
