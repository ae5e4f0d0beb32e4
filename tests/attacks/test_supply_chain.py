"""What comes from others: packages, images, and the rights that these get."""

import http.server
import json
import re
import subprocess
import sys
import threading

import kubernetes_validate
import yaml
from hosts import ROOT, run


def test_known_weaknesses_fail_the_audit_but_for_those_that_cannot_be_reached():
    known = {"horovod": "CVE-2024-10190", "pillow": "CVE-2099-1"}
    when = {"modified": "2026-01-01T00:00:00Z"}

    class Service(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            length = int(self.headers["Content-Length"])
            request = json.loads(self.rfile.read(length))
            ids = [known.get(query["package"]["name"]) for query in request["queries"]]
            found = [{"vulns": [{"id": i} | when]} if i else {} for i in ids]
            self.answer({"results": found})

        def do_GET(self) -> None:
            self.answer({"id": self.path.split("/")[-1]} | when)

        def answer(self, found: object) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(found).encode())

        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Service) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        service = f"--service-url=http://127.0.0.1:{server.server_port}"
        makefile = (ROOT / "docker/common.mk").read_text()
        command = re.search(r"uv audit (.*?)\$\(ARGS\)", makefile, re.DOTALL)[1]
        words = ["uv", "audit", *command.replace("\\", "").split(), service]
        ended = subprocess.run(
            words, cwd=ROOT / "template", capture_output=True, text=True
        )
        assert ended.returncode == 1 and "CVE-2099-1" in ended.stdout, ended.stderr
        assert "CVE-2024" not in ended.stdout
        server.shutdown()


def test_all_that_set_up_installs_or_builds_with_has_a_hash():
    """But for hvdkit, which is there, and the wheel of Horovod, which set-up has built."""
    scripts = [*ROOT.glob("docker/*.sh"), *ROOT.glob("docker/setup/*.sh")]
    text = "\n".join(script.read_text() for script in scripts).replace("\\\n", " ")
    calls = re.findall(r'"\$(?:pip|uv)" .*\b(?:install|download|wheel) .*', text)
    assert len(calls) == 8
    for call in calls:
        is_local = '"$engine"' in call or "--offline" in call
        assert is_local or "--require-hashes" in call, call
        # Of source code pip would fetch the newest setuptools, unless it is told not to.
        builds = "--no-binary" in call or '"$engine"' in call
        assert not builds or "--no-build-isolation" in call, call


def test_a_forks_ci_looks_for_known_weaknesses_every_week():
    workflow = yaml.safe_load((ROOT / "template/.github/workflows/ci.yml").read_text())
    triggers = workflow[True]  # YAML 1.1 reads `on` as a truth value
    assert len(triggers["schedule"]) == 1
    commands = [step.get("run") for step in workflow["jobs"]["audit"]["steps"]]
    assert "make audit" in commands
    bot = yaml.safe_load((ROOT / "template/.github/dependabot.yml").read_text())
    asked = {update["package-ecosystem"] for update in bot["updates"]}
    assert asked == {"uv", "github-actions"}


def test_the_image_has_bases_by_digest_and_no_program_with_another_users_rights():
    text = (ROOT / "Dockerfile").read_text()
    assert (
        len(re.findall(r"^ARG \w+_IMAGE=\S+@sha256:[0-9a-f]{64}$", text, re.MULTILINE))
        == 2
    )
    assert "find / -xdev -type f -perm /6000 -exec chmod a-s {} +" in text
    compose = yaml.safe_load((ROOT / "docker/compose.yaml").read_text())
    for service in compose["services"].values():
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]


def test_only_a_jobs_own_pods_reach_its_ports():
    policy = yaml.safe_load((ROOT / "launch/networkpolicy.yaml").read_text())
    kubernetes_validate.validate(policy, "1.27", strict=True)
    assert policy["spec"]["ingress"] == [
        {"from": [{"podSelector": policy["spec"]["podSelector"]}]}
    ]
    assert policy["spec"]["policyTypes"] == ["Ingress"]


def test_doctor_says_what_protects_a_host(tmp_path):
    doctor = [
        sys.executable,
        ROOT / "launch/doctor.py",
        "--security",
        f"--run_dir={tmp_path}",
    ]
    tmp_path.chmod(0o700)
    assert f"holds: {tmp_path} is this user's alone to write" in run(doctor, 20).output
    tmp_path.chmod(0o777)
    found = run(["setpriv", "--no-new-privs", *doctor], 20).output
    assert f"no: {tmp_path} is this" in found and "holds: no new privileges" in found
