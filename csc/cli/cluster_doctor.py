"""`csc doctor --cluster`: has a cluster what a profile names, and what do its retries do? One line per answer.

What may not be seen is `unknown`, with the kubectl command for somebody who may look.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import yaml

from csc.cli.doctor import Check
from csc.pipelines.cluster.kubernetes import Kubernetes, NotVisible
from csc.pipelines.profile import Profile, Secret, read_profile
from csc.report.text import single_line

__all__ = ["RetryPolicy", "cluster_checks", "retry_warning"]

KUBEFLOW = "kubeflow"  # the namespace of Kubeflow's own parts, and of runs where it has one user
CONFIGMAP = "workflow-controller-configmap"
ACCOUNTS = ("default-editor", "pipeline-runner")  # of steps if the profile names none: with many users, with one
PULL_SECRETS = ("kubernetes.io/dockerconfigjson", "kubernetes.io/dockercfg")
TRAINER = "trainer.kubeflow.org"
MEANINGS = {
    "OnError": "pods that vanish are tried again, steps that fail are not",
    "OnTransientError": "pods whose end Argo calls transient are tried again, steps that fail otherwise are not",
    "OnFailure": "steps that fail are tried again, refused input too; pods that vanish are not",
    "Always": "whatever fails is tried again: pods, steps, refused input, and sub-pipelines on top",
}
SUITABLE_POLICIES = ("OnError", "OnTransientError")
ADVICE = "an administrator can set OnError, see docs/profiles.md, 'Retries'"


@dataclass(frozen=True)
class RetryPolicy:
    """What the workflow controller does with a step that did not succeed."""

    name: str = "OnFailure"  # Argo's own, if nobody sets another
    limit: int = 0  # how often it tries those steps again that ask for nothing themselves
    condition: str = ""  # an expression of Argo's that must hold as well

    @classmethod
    def from_configmap(cls, data: Mapping[str, str]) -> "RetryPolicy":
        """Read the defaults that a controller gives to all workflows; in old installations they are below `config`."""
        try:
            whole = yaml.safe_load(data.get("config", "")) or {}
            defaults = yaml.safe_load(data.get("workflowDefaults", "")) or whole.get("workflowDefaults") or {}
            strategy = ((defaults.get("spec") or {}).get("templateDefaults") or {}).get("retryStrategy") or {}
            condition = " ".join(str(strategy.get("expression") or "").split())
            name = strategy.get("retryPolicy") or ("Always" if condition else cls.name)  # Argo's rule
            return cls(str(name), int(strategy.get("limit") or 0), condition)
        except (yaml.YAMLError, AttributeError, TypeError, ValueError, RecursionError):
            raise NotVisible(f"{CONFIGMAP} holds something else than Argo's settings") from None

    def check(self, pods: int) -> Check:
        """Say what it means for a profile with so many `retry.pods`."""
        tries, whose = (pods, "retry.pods") if pods else (self.limit, "the cluster's default")
        often = f"up to {tries} times ({whose})" if tries else "but nothing here asks for it: retry.pods is 0"
        meaning = MEANINGS.get(self.name, "a policy that this version does not know")
        if self.condition:
            meaning += f", all of it only where {self.condition}"
        text = f"{self.name}: {meaning}; {often}"
        if self.name in SUITABLE_POLICIES or self.condition or not tries:
            return Check("retries", "ok", text)
        remedy = ADVICE if self.limit else f"set retry.pods: 0, or {ADVICE}"
        return Check("retries", "warning", f"{text}; {remedy}")


def retry_policy(cluster: Kubernetes, namespace: str) -> RetryPolicy:
    """The retry policy of Kubeflow's workflow controller, or of a controller in the namespace of the runs."""
    namespaces = tuple(dict.fromkeys((KUBEFLOW, namespace)))
    for name in namespaces:
        if (found := cluster.get("config_map", CONFIGMAP, name)) is not None:
            return RetryPolicy.from_configmap(found.data or {})
    raise NotVisible(f"there is none in {' or '.join(namespaces)}")


def retry_warning(profile: Profile, namespace: str = "", seconds: float = 3.0) -> str:
    """One line if the cluster treats `retry.pods` otherwise than intended; empty if it does not or cannot be asked."""
    if not profile.retry.pods:
        return ""
    found: list[str] = []

    def look() -> None:
        with contextlib.suppress(Exception):  # a warning must not be in the way of what it warns of
            cluster = Kubernetes.connect(seconds)
            policy = retry_policy(cluster, namespace or profile.cluster.namespace or KUBEFLOW)
            check = policy.check(profile.retry.pods)
            if check.status == "warning":
                found.append(f"warning: {cluster.name} has the retry policy {check.text}")

    looking = threading.Thread(target=look, daemon=True)  # a login program that the kubeconfig names may hang
    looking.start()
    looking.join(seconds)
    return found[0] if found else ""


def cluster_checks(profile: str | None, namespace: str | None) -> Iterator[Check]:
    """Ask everything, one after the other; without a profile only the retry policy and the account."""
    for check in _checks(profile, namespace):
        yield replace(check, text=single_line(check.text))  # some of it is what the cluster says


def _checks(profile: str | None, namespace: str | None) -> Iterator[Check]:
    asked = read_profile(profile) if profile else Profile()
    where = namespace or asked.cluster.namespace or KUBEFLOW
    account, claim = asked.cluster.service_account, asked.storage.volume.claim
    cluster = Kubernetes()
    try:
        found = Kubernetes.connect()
        yield Check("cluster", "ok", f"{found.name} · Kubernetes {found.version()} · namespace {where}")
        cluster = found
    except NotVisible as reason:
        yield Check("cluster", "failed", f"{reason}; 'kubectl cluster-info' must work here, or KUBECONFIG name a file")
    command = f"-n {KUBEFLOW} get configmap {CONFIGMAP} -o yaml"
    yield _answer("retries", command, lambda: retry_policy(cluster, where).check(asked.retry.pods))
    for secret in (one for one in (asked.secrets.s3, asked.secrets.mlflow) if one.name):
        yield _answer("secret", f"-n {where} describe secret {secret.name}", _secret, cluster, where, secret)
    for name in asked.images.pull_secrets:
        yield _answer("pull", f"-n {where} get secret {name}", _pull_secret, cluster, where, name)
    if claim:
        yield _answer("claim", f"-n {where} get pvc {claim}", _claim, cluster, where, claim)
    yield _answer("account", f"-n {where} get serviceaccount {account}".rstrip(), _account, cluster, where, account)
    user = f"--as system:serviceaccount:{where}:{account or 'ACCOUNT'}"
    command = f"-n {where} auth can-i create trainjobs.{TRAINER} {user}"
    yield _answer("trainjobs", command, _train_jobs, cluster, where, account)


def _answer(name: str, command: str, look: Callable[..., Check], *arguments: Any) -> Check:
    """The check that `look` makes; if the caller may not look, an unknown one with the command for somebody who may."""
    try:
        return look(*arguments)
    except NotVisible as reason:
        return Check(name, "unknown", f"{reason}; to look: kubectl {command}")


def _secret(cluster: Kubernetes, namespace: str, secret: Secret) -> Check:
    """Whether a secret has the keys that the profile names; its values are never looked at."""
    found = cluster.get("secret", secret.name, namespace)
    if found is None:
        return Check("secret", "failed", f"{secret.name}: not in {namespace}; deploy/secrets.example.yaml shows one")
    if missing := sorted(secret.keys.keys() - (found.data or {}).keys()):
        return Check("secret", "failed", f"{secret.name}: has no key {', '.join(missing)}, which the profile names")
    return Check("secret", "ok", f"{secret.name} · {', '.join(secret.keys)}")


def _pull_secret(cluster: Kubernetes, namespace: str, name: str) -> Check:
    found = cluster.get("secret", name, namespace)
    if found is None:
        remedy = f"make it with: kubectl -n {namespace} create secret docker-registry {name} …"
        return Check("pull", "failed", f"{name}: not in {namespace}; {remedy}")
    if found.type not in PULL_SECRETS:
        return Check("pull", "failed", f"{name}: of type {found.type}; images are pulled with {PULL_SECRETS[0]}")
    return Check("pull", "ok", name)


def _claim(cluster: Kubernetes, namespace: str, name: str) -> Check:
    found = cluster.get("persistent_volume_claim", name, namespace)
    if found is None:
        return Check("claim", "failed", f"{name}: not in {namespace}; deploy/storage.yaml makes one")
    modes = found.spec.access_modes or []
    text = f"{name} · {', '.join(modes)} · {found.status.phase}"
    if "ReadWriteMany" not in modes:
        return Check("claim", "warning", f"{text}; steps on other nodes wait for it: use a claim that is ReadWriteMany")
    return Check("claim", "ok" if found.status.phase != "Lost" else "failed", text)


def _found_account(cluster: Kubernetes, namespace: str, named: str) -> str:
    """The account of the steps, if it is there; of those that Kubeflow uses, if the profile names none."""
    names = (named,) if named else ACCOUNTS
    return next((name for name in names if cluster.get("service_account", name, namespace) is not None), "")


def _account(cluster: Kubernetes, namespace: str, named: str) -> Check:
    if found := _found_account(cluster, namespace, named):
        return Check("account", "ok", found if named else f"{found}, as the profile names none")
    wanted = named or " or ".join(ACCOUNTS)
    return Check("account", "failed", f"{wanted}: not in {namespace}; check cluster.service_account and the namespace")


def _train_jobs(cluster: Kubernetes, namespace: str, named: str) -> Check:
    account = _found_account(cluster, namespace, named)
    if not account:
        raise NotVisible("the account is not there")
    if all(cluster.may(account, namespace, TRAINER, "trainjobs", verb) for verb in ("create", "get", "delete")):
        return Check("trainjobs", "ok", f"{account} may start them: train.nodes above 1 is possible")
    text = f"{account} may not create, get and delete them; only train.nodes above 1 needs that: deploy/rbac.yaml"
    return Check("trainjobs", "missing", text)
