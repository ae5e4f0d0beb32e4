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
SMALL = (
    f"--task=classification {USUAL} --model=resnet20 --image_size=64 --cpu_threads=1"
)
RANDOM = "--synthetic_data --num_classes=1000"
PHOTOS = "--data_format=class_folders --data_dir={photos} --num_classes=4"
DEEPLAB = f"--task=segmentation {USUAL} --model=deeplabv3plus --image_size=512"
HEAD = (
    "ranks",
    "setting",
    "PyTorch, samples/s",
    "bare, samples/s",
    "ours, samples/s",
    "ours / bare",
    "over",
    "of 1 rank",
    "of peak",
    "input wait",
    "reduction alone",
    "memory of a rank, GiB",
)


class Row(NamedTuple):
    flags: str
    bare: bool = False  # whether the bare loop runs too
    torch: str = ""  # the name that PyTorch has for this precision
    over: str = ""  # the row that it is compared with
    fewest: int = 1  # on fewer ranks it does not run
    env: dict[str, str] | None = None
    data: str = RANDOM
    deeplab: bool = False


def rows(gpus: bool) -> dict[str, Row]:
    """The rows by name; {ranks} in their flags is the number of ranks."""
    plain = "float32, TF32 off" if gpus else "float32"
    tf32_off = {"NVIDIA_TF32_OVERRIDE": "0"} if gpus else None
    rows_by_name = {plain: Row("", bare=True, torch="float32", env=tf32_off)}
    bfloat16 = "--precision=bfloat16"
    if gpus:
        rows_by_name |= {
            "float32, TF32 on": Row("", bare=True, torch="tf32", over=plain),
            "DeepLabV3+, TF32 on": Row("", deeplab=True),
            "DeepLabV3+, bfloat16": Row(
                bfloat16, over="DeepLabV3+, TF32 on", deeplab=True
            ),
        }
    return rows_by_name | {
        "bfloat16": Row(bfloat16, bare=True, torch="bfloat16", over=plain),
        "float16": Row("--precision=float16", bare=True, over=plain),
        "bfloat16, input on": Row(bfloat16, over="bfloat16", data=PHOTOS),
        "bfloat16, --bn_sync=full": Row(
            f"{bfloat16} --bn_sync=full", over="bfloat16", fewest=2
        ),
        "bfloat16, --jit": Row(f"{bfloat16} --jit", over="bfloat16"),
        f"{plain}, --virtual_ranks": Row(V_IS_N, over=plain, fewest=2, env=tf32_off),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--ranks", help="with commas; by default powers of two, as many as GPUs"
    )
    parser.add_argument(
        "--batch", type=int, default=64, help="samples a GPU; DeepLabV3+: 1/8"
    )
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument(
        "--torch", type=Path, metavar="PYTHON", help="interpreter that has PyTorch"
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="beginnings of names")
    args = parser.parse_args()
    gpus = check()
    counts = powers(gpus or 2)
    if args.ranks:
        counts = [int(count) for count in args.ranks.split(",")]
    if gpus and max(counts) > gpus:
        parser.error(f"--ranks={args.ranks}: this host has {gpus} GPU(s)")
    if args.torch and not gpus:
        parser.error("--torch is for GPUs, and there is none here: see peers.py")

    all_rows = rows(gpus > 0)
    beginnings = tuple(args.names) or ("",)
    wanted_rows = {
        name: row for name, row in all_rows.items() if name.startswith(beginnings)
    }
    wanted_checks = {
        name: run for name, run in CHECKS.items() if name.startswith(beginnings)
    }
    if not wanted_rows and not wanted_checks:
        parser.error(
            f"nothing begins with {args.names}; there are {[*CHECKS, *all_rows]}"
        )

    failures = []
    if wanted_checks:
        failures += checks(wanted_checks, max(counts), gpus)
    with tempfile.TemporaryDirectory() as folder:
        photos = Path(folder) / "photos"
        if any(row.data == PHOTOS for row in wanted_rows.values()):
            in_own_process("photos", str(photos))
        if wanted_rows:
            rate = Rate(
                steps=args.steps if gpus else 15,
                batch=args.batch if gpus else 4,
                gpus=gpus > 0,
                torch=args.torch,
            )
            failures += table(wanted_rows, counts, rate, photos=photos)
    print("".join(f"\nfailed: {failure}" for failure in failures))
    return 1 if failures else 0


class Rate(NamedTuple):
    """How the rows of the table are measured."""

    steps: int
    batch: int  # samples a rank
    gpus: bool
    torch: Path | None

    def flags(self, row: Row, ranks: int, photos: Path) -> list[str]:
        batch = self.batch
        if row.deeplab:
            model = DEEPLAB
            batch = self.batch // 8
        elif self.gpus:
            model = LARGE
        else:
            model = SMALL
        return [
            *model.split(),
            *row.data.format(photos=photos).split(),
            f"--num_steps={self.steps}",
            f"--global_batch_size={batch * ranks}",
            *row.flags.format(ranks=ranks).split(),
        ]


def checks(wanted: dict[str, Any], ranks: int, gpus: int) -> list[str]:
    """Prints a line for each; returns those that failed."""
    print("| check | seen | seconds |\n| --- | --- | --- |", flush=True)
    failures = []
    for name, run in wanted.items():
        start = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            try:
                seen = run(Path(folder), ranks, gpus)
            except (AssertionError, OSError) as error:
                seen = f"**failed**: {' '.join(str(error).split())}"
                failures.append(f"{name}: {error}")
        print(f"| {name} | {seen} | {time.monotonic() - start:.0f} |", flush=True)
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
    flags = [
        "--num_steps=40",
        "--checkpoint_every=20",
        f"--virtual_ranks={max(ranks, 4)}",
    ]
    half = f"--resume={folder}/1/checkpoints/step-00000020"
    runs: dict[str, tuple[int, list[str]]] = {
        "once": (1, flags),
        "again": (1, flags),
        "resumed at 20": (1, [*flags, half]),
    }
    for count in powers(ranks)[1:]:
        runs[f"{count} ranks"] = (count, flags)
    digests = {}
    for number, (name, (count, flags_of_run)) in enumerate(runs.items(), 1):
        summary = demo_run(folder / str(number), count, *flags_of_run)
        digests[name] = summary["weights_sha256"][:12]
    assert len(set(digests.values())) == 1, str(digests)
    return f"{', '.join(digests)}: {digests['once']}"


def demo_run(folder: Path, ranks: int, *flags: str) -> dict[str, Any]:
    launch_well(ranks, ["train.py", *DEMO, *flags, f"--run_dir={folder}"], timeout=1800)
    return json.loads((folder / "summary.json").read_text())


DEMO = ["--flagfile=configs/demo.cfg"]
CHECKS = {
    "doctor": doctor,
    "demo": demo,
    "one rank more than GPUs": one_too_many,
    "same bits": same_bits,
}


def powers(most: int) -> list[int]:
    """Powers of two from 1 to `most`."""
    return [2**exponent for exponent in range(most.bit_length())]


def check() -> int:
    """The number of GPUs; prints what this host has. Raises SystemExit if it cannot go on."""
    host = json.loads(in_own_process("check").splitlines()[-1])
    gpus = host["gpus"]
    if gpus:
        print(
            f"{len(gpus)} GPU(s): {', '.join(set(gpus))}",
            host["versions"],
            sep="\n",
            flush=True,
        )
        query = "--query-gpu=name,memory.total,driver_version"
        with contextlib.suppress(OSError):
            subprocess.run(
                ["nvidia-smi", query, "--format=csv"], timeout=60, check=False
            )
    else:
        print(
            "No GPU here: the small form on CPUs; its figures say nothing about GPUs."
        )
        print(host["versions"], flush=True)
    if host["fault"]:
        raise SystemExit(f"error: {host['fault']}")
    print(flush=True)
    return len(gpus)


def in_own_process(*words: str) -> str:
    """The output of `worker` in another process: this one must not take a device."""
    command = [sys.executable, __file__, "--worker", *words]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if ended.returncode:
        raise SystemExit(ended.stderr[-2000:])
    return ended.stdout


def table(
    wanted: dict[str, Row], counts: list[int], rate: Rate, *, photos: Path
) -> list[str]:
    """Prints the rows as they come; returns those that failed."""
    print(f"| {' | '.join(HEAD)} |")
    print(f"| {' | '.join('---' for _ in HEAD)} |", flush=True)
    ours: dict[tuple[str, int], dict[str, Any]] = {}
    failures = []
    for ranks in counts:
        for name, row in wanted.items():
            if ranks < row.fewest:
                continue
            flags = rate.flags(row, ranks, photos)
            our_kind = "same-batch" if row.data == RANDOM else "train"
            kinds = [our_kind]
            if row.bare:
                kinds.append("bare")
            records = {}
            for kind in kinds:
                records[kind], failure = measure(kind, ranks, flags, env=row.env)
                if failure:
                    failures.append(f"{name}, {ranks} rank(s), {kind}: {failure}")
            if rate.torch and row.torch:
                words = [row.torch, str(rate.batch)]
                records["torch"], failure = torch_rate(rate.torch, ranks, words)
                if failure:
                    failures.append(f"{name}, {ranks} rank(s), PyTorch: {failure}")
            ours[name, ranks] = records[our_kind]
            shown = cells(
                records,
                row,
                over=ours.get((row.over, ranks), {}),
                alone=ours.get((name, 1), {}),
            )
            print(f"| {ranks} | {name} | {' | '.join(shown)} |", flush=True)
    return failures


def torch_rate(
    python: Path, ranks: int, words: list[str]
) -> tuple[dict[str, Any], str]:
    """PyTorch's samples a second as `measure` gives ours: peers.py run by a Python with PyTorch."""
    import hvdkit.ranks.quiet  # noqa: F401

    # isort: split
    import peers
    from hvdkit.observe import speed

    with socket.create_server(("127.0.0.1", 0)) as held:
        port = str(held.getsockname()[1])
    command = [
        python.absolute(),
        peers.__file__,
        "--worker",
        "cuda",
        "10",
        *words,
        port,
    ]
    ended = launched(ranks, [*peers.BECOME, *command], "mpirun", timeout=600)
    seconds_a_step = peers.shown(ended.output)
    if ended.code or not seconds_a_step:
        return {}, f"exit code {ended.code}: {last_lines(ended.output)}"
    samples_a_step = ranks * int(words[1])
    rates = [samples_a_step / seconds for seconds in seconds_a_step]
    return {"samples_per_second": speed.spread(rates)}, ""


def cells(
    records: dict[str, dict[str, Any]],
    row: Row,
    *,
    over: dict[str, Any],
    alone: dict[str, Any],
) -> list[str]:
    """A row of the table, without number of ranks and name.

    `records`: by kind, ours first; `over`, `alone`: records that ours is compared with, or {}.
    """
    ours = next(iter(records.values()))
    bare = records.get("bare", {})
    speed = _mean(ours)
    bare_speed = _mean(bare)
    over_speed = _mean(over)
    alone_speed = _mean(alone)
    speed_of_a_rank = speed / ours.get("ranks", 1)
    shares = ours.get("shares_of_a_step", {})
    peaks = []
    for rank in ours.get("by_rank", []):
        peaks.append(rank["gpu_peak_bytes"] or rank["host_peak_bytes"])
    return [
        _rate(records.get("torch", {})),
        _rate(bare),
        _rate(ours) or "failed",
        f"{speed / bare_speed:.3f}" if speed and bare_speed else "",
        f"{over_speed / speed:.2f} ({row.over})" if speed and over_speed else "",
        f"{speed_of_a_rank / alone_speed:.2f}" if speed and alone_speed else "",
        _percent(ours.get("model_flops", {}).get("utilization")),
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


def launched(
    ranks: int,
    command: list,
    backend: str = "",
    *,
    timeout: int,
    env: dict[str, str] | None = None,
) -> Launch:
    """As `launch`; a launch that hangs counts as failed, and the table goes on."""
    try:
        return launch(ranks, command, backend, timeout=timeout, env=env)
    except AssertionError as error:
        return Launch(-9, str(error))


def measure(
    kind: str, ranks: int, flags: list[str], *, env: dict[str, str] | None
) -> tuple[dict[str, Any], str]:
    """A run's benchmark.json; or {} and why there is none."""
    with tempfile.TemporaryDirectory() as folder:
        flags = [*flags, "--benchmark", f"--run_dir={folder}/run"]
        ended = launched(
            ranks, [Path(__file__), "--worker", kind, *flags], timeout=1800, env=env
        )
        file = Path(folder) / "run" / "benchmark.json"
        if "the update is not compiled" in ended.output:
            return {}, "the step ends in a branch, at which a GPU waits for the host"
        if ended.code == 0 and file.exists():
            return json.loads(file.read_text()), ""
    reasons = ended.errors() or last_lines(ended.output).splitlines()[-1:]
    return {}, f"exit code {ended.code}: {' '.join(reasons)}"


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

    gpus = tf.config.list_physical_devices("GPU")
    details = [tf.config.experimental.get_device_details(gpu) for gpu in gpus]
    fault = "" if gpus else devices.why_no_gpu("auto")
    if len(gpus) > 1 and not hvd.nccl_built():
        fault = "Horovod was built without NCCL: set up again with DEVICE=gpu"

    versions = [f"TensorFlow {tf.__version__}"]
    build = tf.sysconfig.get_build_info()
    if "cuda_version" in build:
        versions.append(f"CUDA {build['cuda_version']}")
    versions.append(f"Keras {keras.__version__}")
    versions.append("Horovod with NCCL" if hvd.nccl_built() else "Horovod without NCCL")
    return {
        "gpus": [gpu.get("device_name", "GPU") for gpu in details],
        "fault": fault,
        "versions": ", ".join(versions),
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
    peers.run_bare(
        clock,
        classification.Task(config),
        rank=world.rank,
        size=world.size,
        scale=LOSS_SCALE if config.precision == "float16" else 1.0,
    )
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
