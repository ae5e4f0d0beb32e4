"""mpijob.yaml and jobset.yaml against the operators' and Kubernetes' own schemas, strictly."""

import json
import os
import re
import subprocess
from pathlib import Path

import jsonschema
import kubernetes_validate
import pytest
import yaml
from hosts import ROOT, executable, run

MANIFEST = ROOT / "launch" / "mpijob.yaml"
JOBSET = ROOT / "launch" / "jobset.yaml"
_VARIANTS = sorted(
    set(re.findall(r"^ *# \[(\w+)\]", MANIFEST.read_text(), re.MULTILINE))
)


def uncommented(*names: str) -> str:
    """The manifest with these variants: comment lines that follow a `# [name]`."""
    lines = []
    name = ""
    for line in MANIFEST.read_text().splitlines():
        comment = re.match(r" *# (?:\[(\w+)\]|(?=[\w ]))", line)
        if comment and comment[1]:
            name = comment[1]
        elif not comment:
            name = ""
        elif name in names:
            line = line.replace("# ", "", 1)
        lines.append(line)
    return "\n".join(lines)


def load(*variants: str) -> dict:
    return yaml.safe_load(uncommented(*variants))


def by_schema(job: dict, kind: str) -> list[str]:
    """Faults that the API server would refuse, but for those of pods and jobs."""
    schema = json.loads(Path(__file__).with_name(f"{kind}.schema.json").read_text())
    faults = []
    for error in jsonschema.Draft202012Validator(schema).iter_errors(job):
        place = "/".join(str(part) for part in error.absolute_path)
        faults.append(f"{place}: {error.message}")
    return faults


def by_kubernetes(name: str, resource: dict) -> list[str]:
    try:
        kubernetes_validate.validate(resource, "1.31", strict=True)
    except kubernetes_validate.ValidationError as error:
        return [f"{name}: {error}"]
    return []


def faults(job: dict) -> list[str]:
    """Faults that the API server or the MPI Operator would refuse in an MPIJob."""
    listed = by_schema(job, "mpijob")
    if listed:
        return listed
    replicas = job["spec"]["mpiReplicaSpecs"]
    for name, replica in replicas.items():
        head = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "x"}}
        listed += by_kubernetes(name, head | {"template": replica["template"]})
        listed += pod_faults(name, replica["template"]["spec"])
    # Pods get the job's name, and their names are host names.
    last = replicas["Worker"]["replicas"] - 1
    longest_name = f"{job['metadata']['name']}-worker-{last}"
    if not re.fullmatch(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?", longest_name):
        listed.append("name " + longest_name)
    return listed


def test_istio_puts_no_proxy_beside_the_ranks():
    """It would outlive the launcher, and part the ranks."""
    templates = [one["template"] for one in load()["spec"]["mpiReplicaSpecs"].values()]
    jobset, *_ = yaml.safe_load_all(JOBSET.read_text())
    for job in jobset["spec"]["replicatedJobs"]:
        templates.append(job["template"]["spec"]["template"])
    assert len(templates) == 4
    for template in templates:
        assert template["metadata"]["labels"]["sidecar.istio.io/inject"] == "false"


def pod_faults(name: str, pod: dict) -> list[str]:
    listed = []
    volumes = {volume["name"] for volume in pod.get("volumes", [])}
    for container in pod["containers"]:
        mounts = {mount["name"] for mount in container.get("volumeMounts", [])}
        if not mounts <= volumes:
            listed.append(f"{name}: no volume {sorted(mounts - volumes)}")
        ports = {port["name"] for port in container.get("ports", [])}
        probe = container.get("readinessProbe", {}).get("tcpSocket", {}).get("port")
        if isinstance(probe, str) and probe not in ports:
            listed.append(f"{name}: no port {probe}")
    return listed


def sound_pods(jobset: dict) -> dict[str, dict]:
    """The pods of a JobSet by name, which have no fault."""
    pods = {}
    for replicated in jobset["spec"]["replicatedJobs"]:
        name = replicated["name"]
        job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}}
        assert by_kubernetes(name, job | replicated["template"]) == []
        pods[name] = replicated["template"]["spec"]["template"]["spec"]
        assert pod_faults(name, pods[name]) == []
    return pods


def test_the_jobset_is_sound_and_gives_its_pods_what_the_mpijob_does():
    jobset, policy = yaml.safe_load_all(JOBSET.read_text())
    # A copy: parts of one anchor are one object.
    jobset = json.loads(json.dumps(jobset))
    assert by_schema(jobset, "jobset") == [] and by_kubernetes("policy", policy) == []
    worker, _ = jobset["spec"]["replicatedJobs"]
    pods = sound_pods(jobset)

    spec = json.loads(json.dumps(load()["spec"]))
    arguments = {}  # by the pod's name: of the JobSet, of the MPIJob
    for name, replica in spec["mpiReplicaSpecs"].items():
        pod = pods[name.lower()]
        mpijob_pod = replica["template"]["spec"]
        assert pod["volumes"].pop() == {
            "name": "ssh",
            "secret": {"secretName": "train-ssh"},
        }
        assert pod.pop("restartPolicy") == replica["restartPolicy"]
        [container] = pod.pop("containers")
        [mpijob_container] = mpijob_pod.pop("containers")
        keys = {"name": "ssh", "mountPath": spec["sshAuthMountPath"]}
        assert container["volumeMounts"].pop() == keys
        arguments[name] = (container.pop("args"), mpijob_container.pop("args"))
        assert pod == mpijob_pod, name
        assert container == mpijob_container, name

    words, mpijob_words = arguments["Launcher"]
    # Its hosts are the workers, by their names in the service's domain; the rest is the same.
    place = words.index("--hosts-from")
    listing = subprocess.run(words[place + 1].split(), capture_output=True, text=True)
    prefix = f"{jobset['metadata']['name']}-{worker['name']}-0-"
    suffix = f".{jobset['spec']['network']['subdomain']}:{spec['slotsPerWorker']}"
    workers = range(worker["template"]["spec"]["completions"])
    assert listing.stdout.split() == [
        prefix + str(number) + suffix for number in workers
    ]
    del words[place : place + 2]
    place = mpijob_words.index("--hostfile")
    del mpijob_words[place : place + 2]
    # JobSet makes a failed worker anew, the MPI Operator does not: a person must be told soon.
    place = mpijob_words.index("--patience")
    assert mpijob_words[place + 1] == "1800"
    del mpijob_words[place : place + 2]
    assert words == mpijob_words
    words, mpijob_words = arguments["Worker"]
    assert words == mpijob_words
    # Only its own pods reach its pods.
    label = policy["spec"]["podSelector"]["matchLabels"]
    assert label == {"jobset.sigs.k8s.io/jobset-name": jobset["metadata"]["name"]}


@pytest.mark.parametrize(
    "variants", [(), *((name,) for name in _VARIANTS), tuple(_VARIANTS)]
)
def test_the_manifest_is_sound(variants: tuple[str, ...]):
    assert faults(load(*variants)) == []
    assert (load(*variants) == load()) == (not variants)
    wrong = load(*variants)
    wrong["spec"]["slotsPerWorker"] = "8"
    assert any("slotsPerWorker" in fault for fault in faults(wrong))


def test_a_gang_is_of_the_workers_alone():
    """The launcher comes after them: as a member of the gang it would be waited for."""
    spec = load("gang")["spec"]
    assert spec["launcherCreationPolicy"] == "WaitForWorkersReady"
    workers = spec["mpiReplicaSpecs"]["Worker"]["replicas"]
    assert spec["runPolicy"]["schedulingPolicy"]["minAvailable"] == workers


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
        read_only = {
            mount["mountPath"]: mount.get("readOnly", False)
            for mount in container["volumeMounts"]
        }
        assert read_only == {"/data": True, "/runs": False, "/dev/shm": False}
    worker = spec["mpiReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0][
        "resources"
    ]
    assert worker["requests"]["nvidia.com/gpu"] == spec["slotsPerWorker"]
    assert worker["limits"]["nvidia.com/gpu"] == spec["slotsPerWorker"]


@pytest.mark.parametrize("code, starts", [(2, 1), (3, 1), (75, 2), (76, 2), (137, 2)])
def test_the_launcher_restarts_what_may_resume(code: int, starts: int, tmp_path: Path):
    """Its own arguments, through the entrypoint, around a command that ends with `code` once."""
    job = load()
    launcher = job["spec"]["mpiReplicaSpecs"]["Launcher"]
    # Each pod that Kubernetes starts is one more try of a run that has ended for good.
    assert (
        launcher["restartPolicy"] == "Never"
        and job["spec"]["runPolicy"]["backoffLimit"] < 5
    )
    [container] = launcher["template"]["spec"]["containers"]
    assert "command" not in container
    [uid] = container["env"]
    field = uid["valueFrom"]["fieldRef"]["fieldPath"]
    assert field.endswith("['batch.kubernetes.io/controller-uid']")
    words = container["args"][: container["args"].index("launch/hosts.sh")]
    words = [word.replace(f"$({uid['name']})", "7") for word in words]
    assert words[:2] == ["hvdkit", "supervise"] and "/runs/.ended-7" in words
    (tmp_path / "hostfile").write_text("train-worker-0 slots=8\n")
    executable(tmp_path / "ssh")  # it answers
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    for path in ("/runs", "/etc/mpi"):
        words = [word.replace(path, str(tmp_path)) for word in words]
    script = 'echo start; [ -e "$0" ] && exit 0; touch "$0"; exit "$1"'
    words[2:2] = ["--pause", "0"]
    words += ["sh", "-c", script, tmp_path / "first", code]
    words.insert(0, ROOT / "docker/entrypoint.sh")
    expected = code if starts == 1 else 0
    first = run(words, 20, env, cwd=ROOT)
    assert first.code == expected, first
    assert first.output.count("start\n") == starts
    again = run(words, 20, env, cwd=ROOT)
    assert again.code == expected, again
    assert "start\n" not in again.output, (
        "a pod made anew ran again what had ended for good"
    )
