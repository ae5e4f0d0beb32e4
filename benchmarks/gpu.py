"""What this host's GPUs do, as a page to paste: does all of it work, and how fast is a step?

    python benchmarks/gpu.py [--ranks=1,2,4,8] [--batch=64] [--steps=120] [NAME ...]
    python benchmarks/gpu.py bfloat16        what has a name that begins with bfloat16
    python benchmarks/gpu.py --torch=PYTHON  PyTorch beside it; --torch names a Python that has it

First it prints GPUs, driver and NCCL, and stops if TensorFlow does not see a GPU.
Then come CHECKS: doctor.py, the demo to its score, a rank too many, the same bits again. They take
as many ranks as --ranks' largest number.
Each row trains ResNet-50 (224 pixels, --batch samples a GPU, SGD with momentum, no weight decay) on
1, 2, 4, ... GPUs, one process each. "bare" is the same model, precision and batch in a loop of 30
lines without checks; "ours" is train.py --benchmark. Both get the same batch at every step; "input
on" reads made-up JPEG photographs of 500x375 pixels instead (4 classes, so a smaller head). "over"
is the time of a step over that of the row in brackets, on as many ranks; "of 1 rank" is the speed
of a rank over that alone. PyTorch's is torchvision's in DDP, channels last, with cudnn.benchmark.

Without a GPU it runs a small form: ResNet-20, 64 pixels, 4 samples a rank, 1 and 2 ranks on CPUs.
That shows that all of it runs; its figures say nothing about GPUs.
"""

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "template"), str(ROOT / "tests" / "helpers")]

from ranks import Launch, last_lines, launch, launch_well

V_IS_N = "--virtual_ranks={ranks}"
USUAL = "--optimizer=sgd --momentum=0.9 --base_lr=0.01 --lr_policy=constant --weight_decay=0"
LARGE = f"--task=classification {USUAL} --model=resnet50 --image_size=224"
LOSS_SCALE = 2.0**10  # float16: fixed, as nothing here looks for overflow
SMALL = f"--task=classification {USUAL} --model=resnet20 --image_size=64 --cpu_threads=1"
RANDOM = "--synthetic_data --num_classes=1000"
PHOTOS = "--data_format=class_folders --data_dir={photos} --num_classes=4"
DEEPLAB = f"--task=segmentation {USUAL} --model=deeplabv3plus --image_size=512"
HEAD = ("ranks", "setting", "PyTorch, samples/s", "bare, samples/s", "ours, samples/s")
HEAD += ("ours / bare", "over")
HEAD += ("of 1 rank", "of peak", "input wait", "reduction alone", "memory of a rank, GiB")


class Row(NamedTuple):
    flags: str
    bare: bool = False  # whether the bare loop has it too
    torch: str = ""  # PyTorch's name for it
    over: str = ""  # the row that it is compared with
    fewest: int = 1  # ranks
    env: dict[str, str] | None = None
    data: str = RANDOM
    deeplab: bool = False


def rows(gpus: bool) -> dict[str, Row]:
    """The rows by name; {ranks} in their flags is how many there are."""
    plain = "float32, TF32 off" if gpus else "float32"
    tf32_off = {"NVIDIA_TF32_OVERRIDE": "0"} if gpus else None
    found = {plain: Row("", bare=True, torch="float32", env=tf32_off)}
    bfloat16 = "--precision=bfloat16"
    if gpus:
        found["float32, TF32 on"] = Row("", bare=True, torch="tf32", over=plain)
        found["DeepLabV3+, TF32 on"] = Row("", deeplab=True)
        found["DeepLabV3+, bfloat16"] = Row(bfloat16, over="DeepLabV3+, TF32 on", deeplab=True)
    return found | {
        "bfloat16": Row(bfloat16, bare=True, torch="bfloat16", over=plain),
        "float16": Row("--precision=float16", bare=True, over=plain),
        "bfloat16, input on": Row(bfloat16, over="bfloat16", data=PHOTOS),
        "bfloat16, --bn_sync=full": Row(f"{bfloat16} --bn_sync=full", over="bfloat16", fewest=2),
        "bfloat16, --jit": Row(f"{bfloat16} --jit", over="bfloat16"),
        f"{plain}, --virtual_ranks": Row(V_IS_N, over=plain, fewest=2, env=tf32_off),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", help="with commas; by default powers of two, as many as GPUs")
    parser.add_argument("--batch", type=int, default=64, help="samples a GPU; DeepLabV3+: 1/8")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--torch", type=Path, metavar="PYTHON", help="interpreter that has PyTorch")
    parser.add_argument("names", nargs="*", metavar="NAME", help="beginnings of names")
    args = parser.parse_args()
    gpus = check()
    counts = [int(n) for n in args.ranks.split(",")] if args.ranks else powers(gpus or 2)
    if gpus and max(counts) > gpus:
        parser.error(f"--ranks={args.ranks}: this host has {gpus} GPU(s)")
    if args.torch and not gpus:
        parser.error("--torch is for GPUs, and there is none here: see peers.py")
    known = rows(gpus > 0)
    first = tuple(args.names) or ("",)
    wanted = {name: row for name, row in known.items() if name.startswith(first)}
    asked = {name: what for name, what in CHECKS.items() if name.startswith(first)}
    if not wanted and not asked:
        parser.error(f"nothing begins with {args.names}; there are {[*CHECKS, *known]}")
    failures = checks(asked, max(counts), gpus) if asked else []
    with tempfile.TemporaryDirectory() as folder:
        photos = Path(folder) / "photos"
        if any(row.data == PHOTOS for row in wanted.values()):
            in_own_process("photos", str(photos))
        if wanted:
            rate = Rate(args.steps if gpus else 15, args.batch if gpus else 4, gpus > 0, args.torch)
            failures += table(wanted, counts, rate, photos=photos)
    print("".join(f"\nfailed: {failure}" for failure in failures))
    return int(bool(failures))


class Rate(NamedTuple):
    """How the rows of the table are measured."""

    steps: int
    batch: int  # samples a rank
    gpus: bool
    torch: Path | None

    def flags(self, row: Row, ranks: int, photos: Path) -> list[str]:
        usual = DEEPLAB if row.deeplab else LARGE if self.gpus else SMALL
        batch = self.batch // 8 if row.deeplab else self.batch
        data = row.data.format(photos=photos)
        more = f"--num_steps={self.steps} --global_batch_size={batch * ranks}"
        return f"{usual} {data} {more} {row.flags}".format(ranks=ranks).split()


def checks(asked: dict[str, Any], ranks: int, gpus: int) -> list[str]:
    """Prints a line for each; those that failed."""
    print("| check | seen | seconds |\n| --- | --- | --- |", flush=True)
    failures = []
    for name, what in asked.items():
        begun = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            try:
                seen = what(Path(folder), ranks, gpus)
            except (AssertionError, OSError) as error:
                seen = f"**failed**: {' '.join(str(error).split())}"
                failures.append(f"{name}: {error}")
        print(f"| {name} | {seen} | {time.monotonic() - begun:.0f} |", flush=True)
    print(flush=True)
    return failures


def doctor(folder: Path, ranks: int, gpus: int) -> str:
    command = [ROOT / "launch" / "doctor.py", f"--run_dir={folder}"]
    return last_lines(launch_well(ranks, command, timeout=1800).output).splitlines()[-1]


def demo(folder: Path, ranks: int, gpus: int) -> str:
    steps = [] if gpus else ["--num_steps=20"]
    summary = demo_run(folder / "run", ranks, *steps)
    return f"{ranks} rank(s), {summary['step']} steps: mIoU {summary['eval_miou']:.3f}"


def one_too_many(folder: Path, ranks: int, gpus: int) -> str:
    if not gpus:
        return "no GPU"
    ended = launch(gpus + 1, ["train.py", *DEMO, f"--run_dir={folder}/run"])
    assert ended.code == 2, f"exit code {ended.code}: {last_lines(ended.output)}"
    return "refused: " + " ".join(ended.errors())


def same_bits(folder: Path, ranks: int, gpus: int) -> str:
    """The demo with virtual ranks: again, resumed half-way, on each power of two of ranks."""
    flags = ["--num_steps=40", "--checkpoint_every=20", f"--virtual_ranks={max(ranks, 4)}"]
    half = f"--resume={folder}/1/checkpoints/step-00000020"
    runs = {"once": (1, ""), "again": (1, ""), "resumed at 20": (1, half)}
    runs |= {f"{many} ranks": (many, "") for many in powers(ranks)[1:]}
    found = {}
    for number, (name, (many, more)) in enumerate(runs.items(), 1):
        summary = demo_run(folder / str(number), many, *flags, *filter(None, [more]))
        found[name] = summary["weights_sha256"][:12]
    assert len({*found.values()}) == 1, str(found)
    return f"{', '.join(found)}: {found['once']}"


def demo_run(folder: Path, ranks: int, *flags: str) -> dict[str, Any]:
    launch_well(ranks, ["train.py", *DEMO, *flags, f"--run_dir={folder}"], timeout=1800)
    return json.loads((folder / "summary.json").read_text())


DEMO = ["--flagfile=configs/demo.cfg"]
CHECKS = {"doctor": doctor, "demo": demo, "one rank more than GPUs": one_too_many}
CHECKS["same bits"] = same_bits


def powers(most: int) -> list[int]:
    return [2**i for i in range(most.bit_length())]


def check() -> int:
    """The number of GPUs; prints what this host has. Raises SystemExit if it cannot go on."""
    found = json.loads(in_own_process("check").splitlines()[-1])
    gpus = found["gpus"]
    few = "No GPU here: the small form on CPUs; its figures say nothing about GPUs."
    first = f"{len(gpus)} GPU(s): {', '.join({*gpus})}" if gpus else few
    print(first, found["versions"], sep="\n", flush=True)
    if gpus:
        query = "--query-gpu=name,memory.total,driver_version"
        with contextlib.suppress(OSError):
            subprocess.run(["nvidia-smi", query, "--format=csv"], timeout=60, check=False)
    if found["fault"]:
        raise SystemExit(f"error: {found['fault']}")
    print(flush=True)
    return len(gpus)


def in_own_process(*words: str) -> str:
    """The output of `worker` in another process: this one must not take a device."""
    command = [sys.executable, __file__, "--worker", *words]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if ended.returncode:
        raise SystemExit(ended.stderr[-2000:])
    return ended.stdout


def table(wanted: dict[str, Row], counts: list[int], rate: Rate, *, photos: Path) -> list[str]:
    """Prints the rows as they come; those that failed."""
    print(f"| {' | '.join(HEAD)} |\n{'| --- ' * len(HEAD)}|", flush=True)
    ours: dict[tuple[str, int], dict[str, Any]] = {}
    failures = []
    for ranks in counts:
        for name, row in wanted.items():
            if ranks < row.fewest:
                continue
            flags = rate.flags(row, ranks, photos)
            how = ["same-batch" if row.data == RANDOM else "train", *["bare"] * row.bare]
            found = {}
            for kind in how:
                found[kind], failure = measure(kind, ranks, flags, env=row.env)
                failures += [f"{name}, {ranks} rank(s), {kind}: {failure}"] * bool(failure)
            if rate.torch and row.torch:
                words = [row.torch, str(rate.batch)]
                found["torch"], failure = torch_rate(rate.torch, ranks, words)
                failures += [f"{name}, {ranks} rank(s), PyTorch: {failure}"] * bool(failure)
            ours[name, ranks] = found[how[0]]
            over, alone = ours.get((row.over, ranks), {}), ours.get((name, 1), {})
            shown = cells(found, row, over=over, alone=alone)
            print(f"| {ranks} | {name} | {' | '.join(shown)} |", flush=True)
    return failures


def torch_rate(python: Path, ranks: int, words: list[str]) -> tuple[dict[str, Any], str]:
    """PyTorch's samples a second as `measure` gives ours: peers.py, by a Python that has it."""
    import hvdkit.ranks.quiet  # noqa: F401

    # isort: split
    import peers
    from hvdkit.observe import speed

    with socket.create_server(("127.0.0.1", 0)) as held:
        port = str(held.getsockname()[1])
    command = [python.absolute(), peers.__file__, "--worker", "cuda", "10", *words, port]
    ended = launched(ranks, [*peers.BECOME, *command], "mpirun", timeout=600)
    if ended.code or not (found := peers.shown(ended.output)):
        return {}, f"exit code {ended.code}: {last_lines(ended.output)}"
    rates = [ranks * int(words[1]) / seconds for seconds in found]
    return {"samples_per_second": speed.spread(rates)}, ""


def cells(
    found: dict[str, dict[str, Any]], row: Row, *, over: dict[str, Any], alone: dict[str, Any]
) -> list[str]:
    """A row of the table. `over`, `alone`: records that it is compared with, or {}."""
    bare, ours = found.get("bare", {}), next(iter(found.values()))
    speed, bare_speed, over_speed = (_mean(x) for x in (ours, bare, over))
    each, alone_speed = speed / ours.get("ranks", 1), _mean(alone)
    shares, work = ours.get("shares_of_a_step", {}), ours.get("model_flops", {})
    peaks = [own["gpu_peak_bytes"] or own["host_peak_bytes"] for own in ours.get("by_rank", [])]
    return [
        _rate(found.get("torch", {})),
        _rate(bare),
        _rate(ours) or "failed",
        f"{speed / bare_speed:.3f}" if speed and bare_speed else "",
        f"{over_speed / speed:.2f} ({row.over})" if speed and over_speed else "",
        f"{each / alone_speed:.2f}" if speed and alone_speed else "",
        _percent(work.get("utilization")),
        _percent(shares.get("input")),
        _percent(shares.get("reduction_alone")),
        f"{max(peaks) / 2**30:.1f}" if peaks else "",
    ]


def _mean(record: dict[str, Any]) -> float:
    return record["samples_per_second"]["mean"] if record else 0.0


def _rate(record: dict[str, Any]) -> str:
    """Mean and half of its 95 % interval."""
    if not record:
        return ""
    low, high = record["samples_per_second"]["interval_95"]
    return f"{_mean(record):.4g} ± {(high - low) / 2:.2g}"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"


def launched(ranks: int, command: list, *words: str, **how: Any) -> Launch:
    """As `launch`; what hung has failed like any other, and the table goes on."""
    try:
        return launch(ranks, command, *words, **how)
    except AssertionError as error:
        return Launch(-9, str(error))


def measure(
    kind: str, ranks: int, flags: list[str], *, env: dict[str, str] | None
) -> tuple[dict[str, Any], str]:
    """A run's benchmark.json; or {} and why there is none."""
    with tempfile.TemporaryDirectory() as folder:
        flags = [*flags, "--benchmark", f"--run_dir={folder}/run"]
        ended = launched(ranks, [Path(__file__), "--worker", kind, *flags], timeout=1800, env=env)
        file = Path(folder) / "run" / "benchmark.json"
        if ended.code == 0 and file.exists():
            return json.loads(file.read_text()), ""
    why = ended.errors() or last_lines(ended.output).splitlines()[-1:]
    return {}, f"exit code {ended.code}: {' '.join(why)}"


def worker(kind: str, *words: str) -> None:
    """What this file does in another process, by kind.

    check          prints devices and versions, as JSON
    photos FOLDER  writes JPEG photographs
    bare FLAGS, same-batch FLAGS, train FLAGS
                   on each rank: a bare Horovod loop; train.py with one batch for every step;
                   train.py. FLAGS are train.py's; --run_dir gets benchmark.json
    """
    if kind == "photos":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import hvdkit.ranks.quiet  # noqa: F401

    # isort: split
    import peers

    if kind == "check":
        print(json.dumps(devices_and_versions()))
    elif kind == "photos":
        import input as input_benchmark

        input_benchmark.make("photos", Path(*words), shards=1)
    elif kind == "bare":
        bare(list(words))
    else:
        peers.train_py(peers.Clock(0, 1), list(words), same_batch=kind == "same-batch")


def devices_and_versions() -> dict[str, Any]:
    import horovod.tensorflow as hvd
    import keras
    import tensorflow as tf

    from hvdkit.ranks import devices

    found = tf.config.list_physical_devices("GPU")
    details = [tf.config.experimental.get_device_details(gpu) for gpu in found]
    built = tf.sysconfig.get_build_info()
    cuda = f", CUDA {built['cuda_version']}" if "cuda_version" in built else ""
    nccl = "with NCCL" if hvd.nccl_built() else "without NCCL"
    fault = "" if found else devices.why_no_gpu("auto")
    if len(found) > 1 and not hvd.nccl_built():
        fault = "Horovod was built without NCCL: set up again with DEVICE=gpu"
    return {
        "gpus": [each.get("device_name", "GPU") for each in details],
        "fault": fault,
        "versions": f"TensorFlow {tf.__version__}{cuda}, Keras {keras.__version__}, Horovod {nccl}",
    }


def bare(flags: list[str]) -> None:
    """The plainest loop: forward, backward, DistributedGradientTape, Keras's SGD; no checks."""
    import peers
    from hvdkit import settings as settings_lib
    from hvdkit.observe import speed
    from hvdkit.ranks import world as world_lib
    from tasks import classification

    world = world_lib.connect()
    config = settings_lib.parse(["gpu.py", *flags]).for_ranks(world.size)
    world_lib.set_up(world, config)
    world_lib.set_numbers(config)
    clock = peers.Clock(speed.WINDOWS, config.num_steps // (speed.WINDOWS + 1))
    how = {"scale": LOSS_SCALE if config.precision == "float16" else 1.0}
    peers.run_bare(clock, classification.Task(config), rank=world.rank, size=world.size, **how)
    if world.is_chief:
        rates = [config.global_batch_size / seconds for seconds in clock.windows()]
        path = Path(config.run_dir) / "benchmark.json"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps({"samples_per_second": speed.spread(rates)}))
    world_lib.finish(world)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        sys.exit(worker(*sys.argv[2:]))
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    sys.exit(main())
