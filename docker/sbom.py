"""Prints what an image holds, as CycloneDX 1.5 (JSON): Python's packages and the system's.

Run inside the image, by its own Python and without anything else: docker/build.sh does, SBOM=FILE.
"""

import datetime
import importlib.metadata
import json
import subprocess
import sys
import urllib.parse
import uuid


def component(kind: str, name: str, version: str, purl: str) -> dict[str, object]:
    """A package; `purl` is its name all over the world (package URL)."""
    return {"type": kind, "name": name, "version": version, "purl": purl, "bom-ref": purl}


def python_packages() -> list[dict[str, object]]:
    found = {}
    for package in importlib.metadata.distributions():
        name, version = package.metadata["Name"].lower().replace("_", "-"), package.version
        purl = f"pkg:pypi/{name}@{quoted(version)}"
        found[purl] = component("library", name, version, purl)
    return list(found.values())


def system_packages(distribution: dict[str, str]) -> list[dict[str, object]]:
    layout = "${db:Status-Abbrev}\t${Package}\t${Version}\t${Architecture}\n"
    listed = subprocess.run(
        ["dpkg-query", "--show", "--showformat", layout], capture_output=True, text=True, check=True
    )
    release = f"{distribution['ID']}-{distribution.get('VERSION_ID', '')}"
    found = []
    for line in listed.stdout.splitlines():
        status, name, version, architecture = line.split("\t")
        if status.startswith("ii"):  # installed, whole
            purl = f"pkg:deb/{distribution['ID']}/{quoted(name)}@{quoted(version)}"
            purl += f"?arch={architecture}&distro={release}"
            found.append(component("library", name, version, purl))
    return found


def quoted(text: str) -> str:
    return urllib.parse.quote(text, safe=".-_~")


def read_distribution() -> dict[str, str]:
    with open("/etc/os-release") as file:
        pairs = (line.strip().partition("=") for line in file if "=" in line)
        return {name: value.strip('"') for name, _, value in pairs}


def main() -> None:
    distribution = read_distribution()
    system = component(
        "operating-system",
        distribution["ID"],
        distribution.get("VERSION_ID", ""),
        f"pkg:generic/{distribution['ID']}@{distribution.get('VERSION_ID', '')}",
    )
    packages = [*python_packages(), *system_packages(distribution)]
    now = datetime.datetime.now(datetime.timezone.utc)
    image = {"type": "container", "name": sys.argv[1], "bom-ref": "image"}
    document = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "serialNumber": f"urn:uuid:{uuid.uuid4()}",
        "version": 1,
        "metadata": {"timestamp": now.isoformat(timespec="seconds"), "component": image},
        "components": [system, *sorted(packages, key=lambda package: str(package["purl"]))],
    }
    json.dump(document, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
