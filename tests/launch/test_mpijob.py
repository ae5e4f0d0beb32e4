"""mpijob.yaml: its pods against Kubernetes' own schemas, strictly; the rest by MPIJob's rules."""

import os
import re
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from hosts import ROOT, run

MANIFEST = ROOT / "launch" / "mpijob.yaml"
# The fields of an MPIJob: manifests/base/kubeflow.org_mpijobs.yaml of the MPI Operator, v0.8.2.
_SPEC = {
    "slotsPerWorker": int, "runLauncherAsWorker": bool, "runPolicy": dict, "mpiReplicaSpecs": dict,
    "sshAuthMountPath": str, "launcherCreationPolicy": str, "mpiImplementation": str,
}  # fmt: skip
_RUN_POLICY = {
    "cleanPodPolicy": str, "ttlSecondsAfterFinished": int, "activeDeadlineSeconds": int,
    "backoffLimit": int, "schedulingPolicy": dict, "suspend": bool, "managedBy": str,
}  # fmt: skip
_SCHEDULING = {
    "minAvailable": int, "queue": str, "minResources": dict, "priorityClass": str,
    "scheduleTimeoutSeconds": int,
}  # fmt: skip
_REPLICA = {"replicas": int, "restartPolicy": str, "template": dict}
# What its validation.go takes.
_WORDS = {
    "cleanPodPolicy": ("None", "Running", "All"),
    "managedBy": ("kubeflow.org/mpi-operator", "kueue.x-k8s.io/multikueue"),
    "mpiImplementation": ("OpenMPI", "Intel", "MPICH"),
    "launcherCreationPolicy": ("AtStartup", "WaitForWorkersReady"),
    "restartPolicy": ("Never", "OnFailure"),
}
_VARIANTS = ("kueue", "gang", "tolerations", "rdma", "efa")


def uncommented(*names: str) -> str:
    """The manifest with these variants: comment lines that follow a `# [name]`."""
    lines, name = [], ""
    for line in MANIFEST.read_text().splitlines():
        found = re.match(r" *# (?:\[(\w+)\]|(?=[\w ]))", line)
        if found and found[1]:
            name = found[1]
        elif not found:
            name = ""
        elif name in names:
            line = line.replace("# ", "", 1)
        lines.append(line)
    return "\n".join(lines)


def load(*variants: str) -> dict:
    return yaml.safe_load(uncommented(*variants))


def unknown(where: str, given: dict, fields: dict[str, type]) -> list[str]:
    """Fields that there are not, values of another type, words that are not among those known."""
    found = [f"{where}: unknown field {name}" for name in given.keys() - fields.keys()]
    for name in given.keys() & fields.keys():
        value = given[name]
        sound = type(value) is fields[name] and value in _WORDS.get(name, (value,))
        if not sound or (fields[name] is int and value < 0):
            found.append(f"{where}: {name} is {value!r}")
    return found


def faults(job: dict) -> list[str]:
    """What the API server or the operator (kubeflow.org/v2beta1) would refuse."""
    spec, policy = job["spec"], job["spec"]["runPolicy"]
    found = unknown("spec", spec, _SPEC) + unknown("runPolicy", policy, _RUN_POLICY)
    found += unknown("schedulingPolicy", policy.get("schedulingPolicy", {}), _SCHEDULING)
    replicas = spec["mpiReplicaSpecs"]
    if (job["apiVersion"], job["kind"]) != ("kubeflow.org/v2beta1", "MPIJob"):
        found.append("kind")
    if set(replicas) != {"Launcher", "Worker"}:
        found.append(f"mpiReplicaSpecs: {sorted(replicas)}")
    if replicas["Launcher"]["replicas"] != 1:
        found.append("one launcher")
    for name, replica in replicas.items():
        found += unknown(name, replica, _REPLICA) + pod_faults(name, replica["template"])
    # Pods get the job's name, and their names are host names.
    longest = f"{job['metadata']['name']}-worker-{replicas['Worker']['replicas'] - 1}"
    if not re.fullmatch(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?", longest):
        found.append(f"name {longest}")
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


@pytest.mark.parametrize("variants", [(), *((name,) for name in _VARIANTS), _VARIANTS])
def test_the_manifest_is_sound(variants: tuple[str, ...]):
    assert faults(load(*variants)) == []


def test_every_variant_is_used():
    named = set(re.findall(r"^ *# \[(\w+)\]", MANIFEST.read_text(), re.MULTILINE))
    assert named == set(_VARIANTS)
    plain = load()
    assert all(load(name) != plain for name in _VARIANTS)
    job = load(*_VARIANTS)
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"]
    spec = job["spec"]
    workers = spec["mpiReplicaSpecs"]["Worker"]
    assert spec["runPolicy"]["suspend"] is True
    # The launcher comes after the workers: as a member of the gang it would be waited for.
    assert spec["launcherCreationPolicy"] == "WaitForWorkersReady"
    assert spec["runPolicy"]["schedulingPolicy"]["minAvailable"] == workers["replicas"]
    worker = workers["template"]["spec"]
    assert worker["tolerations"]
    limits = worker["containers"][0]["resources"]["limits"]
    assert {"rdma/hca_shared_devices_a", "vpc.amazonaws.com/efa"} <= limits.keys()


def test_pods_get_what_training_needs_and_no_more():
    spec = load()["spec"]
    for replica in spec["mpiReplicaSpecs"].values():
        pod = replica["template"]["spec"]
        assert pod["automountServiceAccountToken"] is pod["enableServiceLinks"] is False
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["securityContext"]["fsGroupChangePolicy"] == "OnRootMismatch"
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        assert volumes.keys() == {"data", "runs", "shm"}
        assert volumes["data"]["persistentVolumeClaim"]["readOnly"] is True
        assert volumes["shm"]["emptyDir"]["medium"] == "Memory"
        [container] = pod["containers"]
        assert re.search(r"@sha256:[0-9a-f]{64}$", container["image"])
        mounts = {m["mountPath"]: m.get("readOnly", False) for m in container["volumeMounts"]}
        assert mounts == {"/data": True, "/runs": False, "/dev/shm": False}
    worker = spec["mpiReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]["resources"]
    gpus = [worker[kind]["nvidia.com/gpu"] for kind in ("requests", "limits")]
    assert gpus == [spec["slotsPerWorker"]] * 2


@pytest.mark.parametrize("code, starts", [(2, 1), (3, 1), (75, 2), (76, 2), (137, 2)])
def test_the_launcher_restarts_what_may_resume(code: int, starts: int, tmp_path: Path):
    """Its own arguments, through the entrypoint, around a command that ends with `code` once."""
    job = load()
    launcher = job["spec"]["mpiReplicaSpecs"]["Launcher"]
    # Each pod that Kubernetes starts is one more try of a run that has ended for good.
    assert launcher["restartPolicy"] == "Never" and job["spec"]["runPolicy"]["backoffLimit"] < 5
    [container] = launcher["template"]["spec"]["containers"]
    assert "command" not in container
    [uid] = container["env"]
    field = uid["valueFrom"]["fieldRef"]["fieldPath"]
    assert field.endswith("['batch.kubernetes.io/controller-uid']")
    words = container["args"][: container["args"].index("launch/hosts.sh")]
    words = [word.replace(f"$({uid['name']})", "7") for word in words]
    assert words[:2] == ["hvdkit", "supervise"] and "/runs/.ended-7" in words
    (tmp_path / "hostfile").write_text("train-worker-0 slots=8\n")
    (tmp_path / "ssh").write_text("#!/bin/sh\n")  # it answers
    (tmp_path / "ssh").chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    for path in ("/runs", "/etc/mpi"):
        words = [word.replace(path, str(tmp_path)) for word in words]
    script = 'echo start; [ -e "$0" ] && exit 0; touch "$0"; exit "$1"'
    words[2:2] = ["--pause", "0"]
    words += ["sh", "-c", script, tmp_path / "first", code]
    words.insert(0, ROOT / "docker/entrypoint.sh")
    ends = [run(words, 20, env, cwd=ROOT) for _ in range(2)]
    assert [ended.code for ended in ends] == [code if starts == 1 else 0] * 2, ends
    assert ends[0].output.count("start\n") == starts
    assert "start\n" not in ends[1].output, "a pod made anew ran again what had ended for good"


_WORKER = "spec/mpiReplicaSpecs/Worker"
_POD = f"{_WORKER}/template/spec"


@pytest.mark.parametrize(
    "path, value, said",
    [
        ("spec/slotsPerWorker", "8", "slotsPerWorker"),
        ("spec/runPolicy/backoffLimit", -1, "backoffLimit"),
        ("spec/runPolicy/schedulingPolicy", {"minMember": 3}, "minMember"),
        ("spec/mpiReplicaSpecs/Launcher/replicas", 2, "one launcher"),
        (f"{_WORKER}/restartPolicy", "Always", "restartPolicy"),
        ("metadata/name", "x" * 60, "name x"),
        (f"{_POD}/containers/0/volumeMount", [], "volumeMount"),
        (f"{_POD}/volumes", [], "no volume"),
    ],
)
def test_a_broken_field_is_caught(path: str, value: object, said: str):
    place = job = load()
    *folders, last = path.split("/")
    for name in folders:
        place = place[int(name)] if isinstance(place, list) else place[name]
    place[last] = value
    assert any(said in fault for fault in faults(job)), faults(job)
