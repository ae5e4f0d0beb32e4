"""What comes from others: packages, images, and the rights that these get."""

import re
import sys

import kubernetes_validate
import yaml
from hosts import ROOT, run


def test_the_image_has_bases_by_digest_and_no_program_with_another_users_rights():
    text = (ROOT / "Dockerfile").read_text()
    assert len(re.findall(r"^ARG \w+_IMAGE=\S+@sha256:[0-9a-f]{64}$", text, re.MULTILINE)) == 2
    assert "find / -xdev -type f -perm /6000 -exec chmod a-s {} +" in text
    for service in yaml.safe_load((ROOT / "docker/compose.yaml").read_text())["services"].values():
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]


def test_only_a_jobs_own_pods_reach_its_ports():
    policy = yaml.safe_load((ROOT / "launch/networkpolicy.yaml").read_text())
    kubernetes_validate.validate(policy, "1.27", strict=True)
    assert policy["spec"]["ingress"] == [{"from": [{"podSelector": policy["spec"]["podSelector"]}]}]
    assert policy["spec"]["policyTypes"] == ["Ingress"]


def test_doctor_says_what_protects_a_host(tmp_path):
    doctor = [sys.executable, ROOT / "launch/doctor.py", "--security", f"--run_dir={tmp_path}"]
    tmp_path.chmod(0o700)
    assert f"holds: {tmp_path} is this user's alone to write" in run(doctor, 20).output
    tmp_path.chmod(0o777)
    found = run(["setpriv", "--no-new-privs", *doctor], 20).output
    assert f"no: {tmp_path} is this" in found and "holds: no new privileges" in found
