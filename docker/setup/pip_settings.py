"""From `pip config list` on stdin, as PIP_NAME=VALUE: where packages are and how to get there.

Set-up gives pip these alone: whatever else a machine tells pip (a constraint, user, target, prefix,
require-hashes) was meant for other environments and would break this one.
"""

import ast
import sys

KEPT = {
    *("index-url", "extra-index-url", "find-links", "no-index", "trusted-host"),
    *("proxy", "cert", "client-cert", "keyring-provider", "timeout", "default-timeout", "retries"),
    *("cache-dir", "no-cache-dir", "use-feature"),
    # For an install beside a TensorFlow in the system's Python; of no effect in an environment.
    "break-system-packages",
}

lines = sys.stdin.read().splitlines()
found = {}
for section in ("global", "install", ":env:"):  # later ones win, as in pip
    for line in lines:
        name, _, value = line.partition("=")
        where, _, option = name.rpartition(".")
        if where == section and option in KEPT:
            found[option] = " ".join(ast.literal_eval(value).split())
for option, value in found.items():
    print(f"PIP_{option.replace('-', '_').upper()}={value}")
