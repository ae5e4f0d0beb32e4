"""A file of benchmarks/ as a module: other files there have the names of tests' modules."""

import importlib.util
from types import ModuleType

from hosts import ROOT


def benchmark(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        f"benchmarks_{name}", ROOT / "benchmarks" / f"{name}.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
