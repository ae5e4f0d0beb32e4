"""mpijob.yaml: its pods against Kubernetes' own schemas, strictly; the rest by MPIJob's rules."""

from __future__ import annotations

import copy
import re

import kubernetes_validate
import pytest
import yaml

from hosts import ROOT

MANIFEST = ROOT / "launch" / "mpijob.yaml"
_SPEC = {"slotsPerWorker", "sshAuthMountPath", "launcherCreationPolicy", "runPolicy"}
_SPEC |= {"mpiReplicaSpecs", "mpiImplementation"}
_RUN_POLICY = {"cleanPodPolicy", "ttlSecondsAfterFinished", "activeDeadlineSeconds", "backoffLimit"}
_RUN_POLICY |= {"schedulingPolicy", "suspend"}


def load() -> dict:
    return yaml.safe_load(MANIFEST.read_text())


def faults(job: dict) -> list[str]:
    """What the API server or the operator (kubeflow.org/v2beta1) would refuse."""
    spec, found = job["spec"], []

    def want(sound: bool, what: str) -> None:
        if not sound:
            found.append(what)

    want((job["apiVersion"], job["kind"]) == ("kubeflow.org/v2beta1", "MPIJob"), "kind")
    want(set(spec) <= _SPEC, f"unknown fields {sorted(set(spec) - _SPEC)}")
    want(type(spec["slotsPerWorker"]) is int and spec["slotsPerWorker"] > 0, "slotsPerWorker")
    policy = spec["runPolicy"]
    want(set(policy) <= _RUN_POLICY, f"unknown fields {sorted(set(policy) - _RUN_POLICY)}")
    want(policy["cleanPodPolicy"] in ("None", "Running", "All"), "cleanPodPolicy")
    want(type(policy["backoffLimit"]) is int and policy["backoffLimit"] >= 0, "backoffLimit")
    creation = spec.get("launcherCreationPolicy", "AtStartup")
    want(creation in ("AtStartup", "WaitForWorkersReady"), "launcherCreationPolicy")
    replicas = spec["mpiReplicaSpecs"]
    want(set(replicas) == {"Launcher", "Worker"}, "mpiReplicaSpecs")
    want(replicas["Launcher"]["replicas"] == 1, "one launcher")
    for name, replica in replicas.items():
        want(set(replica) <= {"replicas", "restartPolicy", "template"}, f"{name}: unknown fields")
        want(type(replica["replicas"]) is int and replica["replicas"] > 0, f"{name}: replicas")
        want(replica["restartPolicy"] in ("Never", "OnFailure"), f"{name}: restartPolicy")
        found += pod_faults(name, replica["template"])
    # Pods get the job's name, and their names are host names.
    longest = f"{job['metadata']['name']}-worker-{replicas['Worker']['replicas'] - 1}"
    want(re.fullmatch(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?", longest) is not None, f"name {longest}")
    return found


def pod_faults(name: str, template: dict) -> list[str]:
    wrapped = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "x"}}
    try:
        kubernetes_validate.validate(wrapped | {"template": template}, "1.31", strict=True)
    except kubernetes_validate.ValidationError as error:
        return [f"{name}: {error}"]
    pod, found = template["spec"], []
    volumes = {volume["name"] for volume in pod.get("volumes", [])}
    for container in pod["containers"]:
        mounts = {mount["name"] for mount in container.get("volumeMounts", [])}
        if not mounts <= volumes:
            found.append(f"{name}: no volume {sorted(mounts - volumes)}")
        ports = {port["name"] for port in container.get("ports", [])}
        probe = container.get("readinessProbe", {}).get("tcpSocket", {}).get("port")
        if isinstance(probe, str) and probe not in ports:
            found.append(f"{name}: no port {probe}")
    return found


def test_the_manifest_is_sound():
    assert faults(load()) == []


def test_it_asks_for_what_training_needs():
    job = load()
    workers = job["spec"]["mpiReplicaSpecs"]["Worker"]["template"]["spec"]
    launcher = job["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]
    for pod in (workers, launcher):
        assert pod["securityContext"]["runAsNonRoot"]
        assert {v["name"] for v in pod["volumes"]} == {"data", "runs", "shm"}
    shm = next(v for v in workers["volumes"] if v["name"] == "shm")
    assert shm["emptyDir"]["medium"] == "Memory"
    resources = workers["containers"][0]["resources"]
    slots = job["spec"]["slotsPerWorker"]
    assert resources["requests"]["nvidia.com/gpu"] == resources["limits"]["nvidia.com/gpu"] == slots


def _set(path: str, value: object):
    def change(job: dict) -> None:
        *folders, last = path.split("/")
        for name in folders:
            job = job[int(name)] if isinstance(job, list) else job[name]
        job[last] = value

    return change


_WORKER = "spec/mpiReplicaSpecs/Worker"
_POD = f"{_WORKER}/template/spec"


@pytest.mark.parametrize(
    "change, said",
    [
        (_set("spec/slotsPerWorker", "8"), "slotsPerWorker"),
        (_set("spec/slotPerWorker", 8), "slotPerWorker"),
        (_set("spec/runPolicy/cleanPodPolicy", "Sometimes"), "cleanPodPolicy"),
        (_set("spec/mpiReplicaSpecs/Launcher/replicas", 2), "one launcher"),
        (_set(f"{_WORKER}/restartPolicy", "Always"), "restartPolicy"),
        (_set("metadata/name", "x" * 60), "name x"),
        (_set("metadata/name", "Train"), "name Train"),
        (_set(f"{_POD}/containers/0/volumeMount", []), "volumeMount"),
        (_set(f"{_POD}/containers/0/ports/0/containerPort", "ssh"), "containerPort"),
        (_set(f"{_POD}/containers/0/image", 7), "image"),
        (_set(f"{_POD}/securityContext/runAsNonRoot", "yes"), "runAsNonRoot"),
        (_set(f"{_POD}/volumes", []), "no volume"),
        (_set(f"{_POD}/terminationGracePeriodSecond", 3), "terminationGracePeriodSecond"),
    ],
)
def test_a_broken_field_is_caught(change, said: str):
    job = copy.deepcopy(load())
    change(job)
    assert any(said in fault for fault in faults(job)), faults(job)
