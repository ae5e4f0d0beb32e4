"""hvdkit supervise: what it starts again, how often and where, and what a stop signal does."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hosts import ENVIRONMENT, ROOT, STAND_IN, Hosts, executable, require, run, wait_for
from terminal import CTRL_C, Terminal

from hvdkit.commands.jobs import process_tree, supervise
from ranks import PROJECT, TINY_FLAGS

SUPERVISE = [sys.executable, "-m", "hvdkit", "supervise"]
FAST = [*SUPERVISE, "--pause", "0"]


@pytest.fixture
def answering(tmp_path: Path) -> dict[str, str]:
    executable(tmp_path / "ssh")
    return {"PATH": f"{tmp_path}:{os.environ['PATH']}"}


def test_the_docs_print_the_table_of_the_code():
    assert f"\n\n{supervise.table()}\n\n" in (ROOT / "launch/README.md").read_text()


@pytest.mark.parametrize(
    ("code", "returned", "starts", "said"),
    [
        (0, 0, 1, ""),
        (2, 2, 1, ""),
        (
            9,
            9,
            3,
            "exit code 9 (any other: a crash), crash 3 at step 0, whose trace is above",
        ),
        (134, 134, 3, "exit code 134 (native crash: SIGILL, SIGABRT"),
        (75, 1, 4, "after 3 restarts without a new step: no further start"),
        (76, 76, 3, "s without a new step: no further start"),
    ],
)
def test_a_run_that_ends_without_a_step(
    code: int, returned: int, *, starts: int, said: str
):
    # Of 76, the third start comes after the patience, also where one takes nearly a second.
    pause = "1" if code == 76 else "0"
    words = [*SUPERVISE, "--pause", pause, "--patience", "2.9"]
    words += ["--", "sh", "-c", f"echo start; exit {code}"]
    ended = run(words, 20)
    assert ended.code == returned and said in ended.output, ended.output
    assert ended.output.splitlines().count("start") == starts
    # It goes on where its log cannot be written.
    ended = run(["sh", "-c", '"$@" 2>/dev/full', "sh", *words], 20)
    assert ended.code == returned
    assert ended.output.splitlines() == ["start" for _ in range(starts)]


@pytest.mark.parametrize("code", ["75", "1", "SIGABRT"])
def test_ends_after_a_new_step_are_not_counted(tmp_path: Path, code: str):
    flags = ["--"]
    if code == "1":  # the folder cannot be read off a script
        flags = ["--run-dir", tmp_path, "--", "sh", "-c", '"$@"', "sh"]
    program = [*STAND_IN, f"--run_dir={tmp_path}", "--steps=12", f"--fail=+4:{code}"]
    ended = run([*FAST, *flags, *program], 60)
    assert ended.code == 0 and ended.output.count("begins at step") == 4, ended.output
    assert f"looks for new steps in {tmp_path}\n" in ended.output


# A run that resumes at step 100 each time, and is killed so many steps later.
LOSES = """
cd {tmp}; echo >> starts; n=$(wc -l < starts); mkdir -p checkpoints/step-00000100
echo '{{"step": 100}}' >> starts.jsonl
set -- {steps}; shift $((n - 1))
[ -n "$1" ] || {{ echo '{{"exit_code": 0}}' > summary.json; exit 0; }}
echo '{{"step": '$((100 + $1))', "loss": 1.0}}' > metrics.jsonl
exit {code}
"""


@pytest.mark.parametrize(
    ("steps", "code", "returned", "starts"),
    [
        ("40 60 50 45 55", 137, 0, 6),  # hosts that are lost
        ("60 60 60 60 60", 1, 1, 3),  # a program that fails at a step
        ("40 60 50 45 55", 75, 0, 6),
        ("40 50" + 10 * " 40 50", 1, 1, 11),  # a program that never gets further
    ],
)
def test_steps_that_a_start_made_count_also_where_none_was_saved(
    tmp_path: Path, steps: str, code: int, returned: int, *, starts: int
):
    script = LOSES.format(tmp=tmp_path, steps=steps, code=code)
    ended = run([*FAST, "--run-dir", tmp_path, "--", "sh", "-c", script], 30)
    assert ended.code == returned, ended.output
    assert len((tmp_path / "starts").read_text().splitlines()) == starts, ended.output


def test_what_was_right_before_is_no_wrong_use(tmp_path: Path):
    """A GPU of the one host is lost after some steps, and comes back."""
    script = (
        f"cd {tmp_path}; echo >> starts; case $(wc -l < starts) in "
        "1) mkdir -p checkpoints/step-00000003; exit 1 ;; 2) exit 2 ;; *) exit 0 ;; esac"
    )
    ended = run([*FAST, "--run-dir", tmp_path, "--", "sh", "-c", script], 30)
    assert ended.code == 0 and "exit code 76" in ended.output, ended.output


def test_a_program_whose_disk_goes_away_is_waited_for(tmp_path: Path, answering):
    """Away before the second start, and back before the third."""
    program = shutil.copy(STAND_IN[1], tmp_path)
    lists_hosts = (
        f"cd {tmp_path}; echo node1:1; echo >> asked; case $(wc -l < asked) in "
        "2) mv train.py away ;; 3) mv away train.py ;; esac"
    )
    words = [*FAST, "--hosts-from", lists_hosts, "--", sys.executable, program]
    ended = run(
        [*words, f"--run_dir={tmp_path}/run", "--steps=6", "--fail=+4:1"], 60, answering
    )
    assert ended.code == 0 and "exit code 76" in ended.output, ended.output


def test_a_launcher_whose_disk_goes_away_is_waited_for(tmp_path: Path):
    away = (
        f"cd {tmp_path}; mkdir once || exit 0; mv disk away; "
        "(sleep 1; mv away disk) >/dev/null 2>&1 & exit 1"
    )
    program = executable(tmp_path / "disk/launch", away)
    ended = run([*SUPERVISE, "--pause", "0.2", "--", program], 30)
    assert ended.code == 0 and "exit code 76" in ended.output, ended.output


def test_the_code_of_a_run_that_ends_at_the_moment_of_a_signal(tmp_path: Path):
    """The supervisor is suspended until both have happened."""

    def wait_for_state(process: int, state: str) -> None:
        stat = Path(f"/proc/{process}/stat")
        wait_for(lambda: f") {state} " in stat.read_text(), f"not in state {state}", 10)

    os.mkfifo(tmp_path / "end")
    words = [
        *SUPERVISE,
        "--",
        "sh",
        "-c",
        'echo $$; read line <"$0"; exit 3',
        tmp_path / "end",
    ]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as job:
        child = int(job.stdout.readline())
        with open(tmp_path / "end", "w"):
            time.sleep(0.2)  # it waits for its child by now
            job.send_signal(signal.SIGSTOP)
            wait_for_state(job.pid, "T")
        wait_for_state(child, "Z")  # it has ended, and nobody has asked for its code
        job.terminate()
        job.send_signal(signal.SIGCONT)
        assert job.wait(20) == 3


def test_the_final_exit_code_is_saved_and_that_of_a_stop_is_not(tmp_path: Path):
    ended = tmp_path / "ended"
    for code, kept in ((75, False), (0, True)):
        script = f'trap "" TERM; kill -TERM $PPID; sleep 0.5; exit {code}'
        assert run([*FAST, "--ended", ended, "--", "sh", "-c", script], 20).code == code
        assert ended.exists() == kept
    ended.write_text("soon")
    refused = run([*FAST, "--ended", ended, "--", "true"], 20)
    assert refused.code == 2 and "does not hold an exit code" in refused.output


SAVES = 'trap "echo saved; exit 75" TERM USR1; echo ready; while :; do sleep 0.1; done'


def heed_ctrl_c() -> None:
    """Programs under test would inherit that the tests' own starter ignores it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT]
)
def test_after_a_stop_signal_the_run_saves_and_is_not_restarted(number: int):
    words = [*SUPERVISE, "--", "sh", "-c", SAVES]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, text=True, preexec_fn=heed_ctrl_c
    ) as job:
        assert job.stdout.readline() == "ready\n"
        job.send_signal(number)
        assert job.stdout.read() == "saved\n"
        assert job.wait(20) == 75


def test_under_nohup_the_loss_of_the_terminal_is_no_stop_and_a_kill_leaves_no_run_behind():
    words = ["nohup", *SUPERVISE, "--", "sh", "-c", SAVES]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, text=True, preexec_fn=heed_ctrl_c
    ) as job:
        assert job.stdout.readline() == "ready\n"
        job.send_signal(signal.SIGHUP)
        time.sleep(1)
        assert job.poll() is None
        job.send_signal(signal.SIGKILL)
        assert job.stdout.read() == "saved\n"
        assert job.wait(20) == -signal.SIGKILL


def test_a_time_limit_between_two_starts_of_a_run_without_a_step_is_no_reason_to_requeue():
    words = [*SUPERVISE, "--stop-ends", "--pause", "20", "--", "sh", "-c", "exit 76"]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as job:
        while "starting again" not in job.stderr.readline():
            pass
        job.send_signal(signal.SIGUSR1)
        assert (
            "no step was made in this start" in job.stderr.read() and job.wait(20) == 1
        )


@pytest.mark.parametrize(
    ("number", "step", "code"),
    [(signal.SIGUSR1, "", 1), (signal.SIGTERM, "step-00000003", 75)],
)
def test_a_signal_that_the_launcher_loses_is_sent_again(
    tmp_path: Path, number: int, step: str, code: int
):
    """srun loses one that comes before it has started the ranks, which then make steps."""
    deaf = (
        f'trap "" USR1; echo deaf; sleep 3; mkdir -p {tmp_path}/checkpoints/{step}\n'
        'trap "exit 75" USR1; while :; do sleep 0.1; done'
    )
    words = [*SUPERVISE, "--stop-ends", "--run-dir", tmp_path, "--", "bash", "-c", deaf]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as job:
        assert job.stdout.readline() == "deaf\n"
        job.send_signal(number)
        said = job.stderr.read()
        assert job.wait(20) == code
        assert ("no step was made in this start" in said) == (code == 1)


# Where a minute takes a third of a second.
FAST_CLOCK = """
import sys, time, types
from hvdkit.commands.jobs import supervise
clock = types.SimpleNamespace(**vars(time))
clock.monotonic = lambda: 200 * time.monotonic()
supervise.time = clock
sys.exit(supervise.main(sys.argv))
"""


@pytest.mark.parametrize("code", [75, 76])
def test_a_long_start_without_a_folder_is_no_run_whose_disk_is_away(
    tmp_path: Path, code: int
):
    words = ["--pause", "0", "--run-dir", tmp_path / "run", "--"]
    fails = f"echo start; echo >> {tmp_path}/starts; sleep 0.5"
    command = [
        "sh",
        "-c",
        f"{fails}; [ $(wc -l < {tmp_path}/starts) = 3 ] || exit {code}",
    ]
    ended = run([sys.executable, "-c", FAST_CLOCK, *words, *command], 30)
    assert ended.code == 0 and ended.output.count("start\n") == 3, ended.output
    assert "mounted" not in ended.output


def test_an_exit_code_that_a_pipe_has_lost_is_the_runs_own(tmp_path: Path):
    """The run is preempted, then it crashes, then it is done; `tee` returns 0 each time."""
    loses = f"""
cd {tmp_path}; echo '{{"step": 0}}' >> starts.jsonl; rm -f summary.json
case $(wc -l < starts.jsonl) in
1) echo '{{"exit_code": 75}}' > summary.json ;;
3) echo '{{"exit_code": 0}}' > summary.json ;;
esac
"""
    words = [*FAST, "--run-dir", tmp_path, "--", "sh", "-c", loses]
    ended = run(words, 30)
    assert ended.code == 0, ended.output
    assert "the command returned 0, but its run ended with 75" in ended.output
    assert "its run wrote no summary.json: a crash" in ended.output
    # Where nothing has begun to train, the command is believed.
    ended = run([*FAST, "--run-dir", tmp_path, "--", "true"], 30)
    assert ended.code == 0


def test_a_process_whose_name_is_cut_within_a_character_is_told(tmp_path: Path):
    program = tmp_path / "обучение-модели"
    shutil.copy(shutil.which("sleep"), program)
    with subprocess.Popen([program, "60"]) as child:
        process_tree.tell(child, signal.SIGTERM)
        assert child.wait(10) == -signal.SIGTERM


def test_a_process_of_another_user_is_named(monkeypatch, capfd):
    with subprocess.Popen(["sleep", "60"]) as child:
        with monkeypatch.context() as patched:

            def refuse(pid: int, number: int) -> None:
                raise PermissionError

            patched.setattr(process_tree.os, "kill", refuse)
            process_tree.tell(child, signal.SIGTERM)
        assert f"process {child.pid} is another user's" in capfd.readouterr().err
        child.kill()


def test_the_first_restart_is_at_once_and_a_stop_between_two_runs_ends_it():
    words = [*SUPERVISE, "--pause", "60", "--", "sh", "-c", "echo start; exit 1"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout.readline() == "start\n"
        start = time.monotonic()
        assert job.stdout.readline() == "start\n"
        assert time.monotonic() - start < 30
        job.terminate()  # it now waits 60 seconds
        assert job.wait(30) in (1, 75, 143)  # 143: the run had not quite ended


@pytest.mark.parametrize(
    "words, message",
    [
        ([], "no command"),
        (["--crash", "3", "--", "true"], "unrecognized arguments: --crash 3"),
        (["--max-np", "many", "--", "true"], "invalid int value: 'many'"),
        (["--pause", "-1", "--", "true"], "--rejoin: 0 or more"),
        (
            ["--", "python", f"{PROJECT}/train.py", "--resume=never"],
            "begin anew at each start",
        ),
        (
            ["--", "python", f"{PROJECT}/train.py", "--resume=x"],
            "begin there at each start",
        ),
        (["--hostfile", "x", "--hosts-from", "y", "--", "true"], "choose one"),
        (["--min-hosts", "2", "--", "true"], "need --hostfile or --hosts-from"),
        (
            ["--hosts-from", "cat {tmp}/hosts", "--", "true"],
            "is no host: a host is letters",
        ),
    ],
)
def test_wrong_use_is_explained(tmp_path: Path, words: list[str], message: str):
    """Also a name that ssh would take for an option."""
    (tmp_path / "hosts").write_text(
        f"node1:1\n-oProxyCommand=touch${{IFS}}{tmp_path}/run:1\n"
    )
    ended = run(
        [*SUPERVISE, *(word.replace("{tmp}", str(tmp_path)) for word in words)], 20
    )
    assert (
        ended.code == 2 and message in ended.output and not (tmp_path / "run").exists()
    )


@pytest.mark.parametrize(("command", "code"), [("no-such-command", 127), ("true", 0)])
def test_a_command_that_prints_no_host_is_named(
    tmp_path: Path, command: str, code: int
):
    words = ["--patience", "1", "--ended", tmp_path / "ended", "--hosts-from", command]
    ended = run([*SUPERVISE, *words, "--", "true"], 30)
    why = f"no host from '{command}', which ended with exit code {code}"
    assert ended.code == 76, ended.output
    assert "waiting for hosts: " + why + "\n" in ended.output, ended.output
    sentence = re.escape(f"error: {why}") + r" for \d+ s; start the job again"
    assert re.search(sentence, ended.output), ended.output
    assert (tmp_path / "ended").read_text() == "76\n"


@pytest.mark.parametrize("ends", [[], ["--stop-ends"]])
def test_words_that_are_no_host_end_no_run_and_a_host_that_comes_back_ends_no_job(
    tmp_path: Path, ends: list[str], answering
):
    """The command prints a warning the second time, and another host from the third on."""
    lists_hosts = (
        f"echo >> {tmp_path}/asked; n=$(wc -l < {tmp_path}/asked); echo node1:1; "
        '[ $n = 2 ] && echo "-bash: warning"; [ $n -lt 3 ] || echo node2:1'
    )
    saves = (
        f"echo start; test -e {tmp_path}/done && exit; touch {tmp_path}/done; "
        'trap "exit 75" USR1; while :; do sleep 0.1; done'
    )
    words = [*FAST, *ends, "--rejoin", "0.2", "--hosts-from", lists_hosts]
    ended = run([*words, "--", "bash", "-c", saves], 30, env=answering)
    assert ended.code == 0 and ended.output.splitlines().count("start") == 2, (
        ended.output
    )
    assert "hosts are not asked: '-bash: warning' of" in ended.output, ended.output
    assert "node2 answers: starting again on all hosts" in ended.output, ended.output


@pytest.mark.parametrize(("lines", "expected"), [
    ("node1\nnode1\nnode2 slots = 3 # three", "node1:2\nnode2:3"),  # PBS: a line a rank
    ("node1 max_slots=8\nnode2 slots=4 max_slots=8\nnode3 max-slots=8 slots=4",
     "node1:1\nnode2:4\nnode3:4"),
    ("node1:8 node2:8", ""),
    ("node1 8", ""),
    ("Last login: today", ""),
    ("node1 slots=0\nnode2:1", ""),
])  # fmt: skip
def test_a_list_of_hosts_is_read_as_hosts_sh_reads_it(
    tmp_path, answering, lines, expected
):
    (tmp_path / "hosts").write_text(lines)
    words = [*SUPERVISE, "--hostfile", tmp_path / "hosts", "--", "sh", "-c"]
    ended = run([*words, 'cat "$LAUNCH_HOSTFILE"'], 20, answering)
    if expected:
        assert ended.code == 0 and ended.output.endswith(f"\n{expected}\n"), (
            ended.output
        )
    else:
        assert ended.code == 2 and "is no host" in ended.output, ended.output
    words = [
        ROOT / "launch/hosts.sh",
        "--dry-run",
        "--hostfile",
        tmp_path / "hosts",
        "true",
    ]
    ended = run(words, 20)
    if expected:
        ranks = sum(int(line.split(":")[1]) for line in expected.split())
        assert f" -np {ranks} " in ended.output, ended.output
    else:
        assert ended.code == 2, ended.output


def test_the_words_of_ssh_are_shown_while_hosts_are_waited_for(
    tmp_path: Path, answering
):
    executable(
        tmp_path / "ssh",
        'case " $* " in *" node2 "*) '
        'echo "@ REMOTE HOST IDENTIFICATION HAS CHANGED! @" >&2\n'
        'echo "Host key verification failed." >&2; exit 255 ;; esac',
    )
    words = [
        *FAST,
        "--hosts-from",
        "echo node1:1; echo node2:1",
        "--patience",
        "0.5",
        "--",
        "true",
    ]
    ended = run(words, 30, env=answering)
    why = "no answer to ssh from node2 (Host key verification failed.)"
    assert ended.code == 76, ended.output
    assert "waiting for hosts: " + why + "\n" in ended.output, ended.output
    assert "error: " + why + " for " in ended.output, ended.output


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("mpirun noticed that process rank 1 with PID 7 on node node2 exited on", 137),
        ("error: cannot start on node2: ssh answers, but its login shell", 76),
        ("error: cannot reach node2, port 22, by ssh: Connection refused", 76),
        (
            "[1,1]<stderr>:error: the device: nvidia-smi fails on node2 (9) (rank 1 on node2)",
            76,
        ),
    ],
)
def test_a_host_that_failed_is_left_out_where_there_are_spares(
    tmp_path: Path, answering, line: str, code: int
):
    """And the folder of the list was cleaned from /tmp meanwhile; the program's flags are not
    ssh's."""
    executable(tmp_path / "ssh", f'echo "$@" >> {tmp_path}/asked')
    executable(
        tmp_path / "hosts.sh",
        'paste -sd, "$LAUNCH_HOSTFILE"; grep -q node2 "$LAUNCH_HOSTFILE" || exit 0\n'
        'rm -r "${LAUNCH_HOSTFILE%/*}"\n'
        f'echo "{line}" >&2\n'
        f"exit {code}",
    )
    words = [
        *FAST,
        "--hosts-from",
        "for n in 1 2 3; do echo node$n:1; done",
        "--max-np",
        "2",
    ]
    ended = run([*words, "--", "bash", tmp_path / "hosts.sh"], 30, answering)
    assert ended.code == 0 and "node1:1,node2:1\n" in ended.output, ended.output
    assert ended.output.endswith("node1:1,node3:1\n"), ended.output
    words = [
        *FAST,
        "--hosts-from",
        "echo node1:1",
        "--patience",
        "1",
        "--min-hosts",
        "2",
        "--",
    ]
    ended = run(
        [*words, tmp_path / "hosts.sh", "-p", "2222", "python", "-i"], 30, answering
    )
    assert ended.code == 76 and "of --min-hosts=2 hosts there are 1" in ended.output, (
        ended.output
    )
    last = (tmp_path / "asked").read_text().splitlines()[-1]
    assert last.endswith(" -p 2222 node1 uname -n"), last


def test_a_host_that_is_listed_by_its_address_is_known_by_its_own_name(
    tmp_path: Path, answering
):
    executable(
        tmp_path / "ssh",
        'case " $* " in *" 10.0.0.1 "*) echo node1.cluster ;; *) echo node2 ;; esac',
    )
    executable(
        tmp_path / "train",
        'cat "$LAUNCH_HOSTFILE"; grep -q 10.0.0.1 "$LAUNCH_HOSTFILE" || exit 0\n'
        'echo "error: the run ends: rank 0 on node1 is gone" >&2\n'
        "exit 76",
    )
    lists_hosts = "echo 10.0.0.1:1; echo 10.0.0.2:1"
    words = [*FAST, "--hosts-from", lists_hosts, "--max-np", "1", "--patience", "5"]
    ended = run([*words, "--", tmp_path / "train"], 30, answering)
    assert ended.code == 0, ended.output
    assert ended.output.endswith("10.0.0.2:1\n"), ended.output


def test_hosts_whose_names_have_one_first_part_are_told_apart(
    tmp_path: Path, answering
):
    executable(tmp_path / "ssh", "echo worker")
    executable(
        tmp_path / "train",
        'cat "$LAUNCH_HOSTFILE"; grep -q gpu.1.foo "$LAUNCH_HOSTFILE" || exit 0\n'
        'echo "error: lost gpu.1.foo, which has not answered for 15 s: ending the run" >&2\n'
        "exit 76",
    )
    lists_hosts = "echo gpu.1.foo:1; echo gpu.2.foo:1"
    words = [*FAST, "--hosts-from", lists_hosts, "--max-np", "1", "--patience", "5"]
    ended = run([*words, "--", tmp_path / "train"], 30, answering)
    assert ended.code == 0, ended.output
    assert ended.output.endswith("gpu.2.foo:1\n"), ended.output


def test_a_run_does_not_begin_anew_where_its_disk_is_not_mounted(
    tmp_path: Path, answering
):
    """From before the end of its first start to its fourth; the command for hosts is before
    each."""
    lists_hosts = f"cd {tmp_path}; echo >> asked; echo node1:1; [ $(wc -l < asked) != 4 ] || mv away run"
    loses_its_folder = (
        f'python "$@"; code=$?; [ -e {tmp_path}/lost ] || mv {tmp_path}/run {tmp_path}/away; '
        f"touch {tmp_path}/lost; exit $code"
    )
    words = [*FAST, "--hosts-from", lists_hosts, "--", "sh", "-c", loses_its_folder]
    words += ["sh", STAND_IN[1]]
    words += [f"--run_dir={tmp_path}/run", "--steps=60", "--fail=+40:1"]
    ended = run(words, 60, answering)
    assert ended.code == 0 and ended.output.count("begins at step 0") == 1, ended.output
    assert ended.output.count("is its disk mounted?") == 2, ended.output
    (tmp_path / "run" / "metrics.jsonl").write_text(
        '{"step": Infinity}\n' + "[" * 60_000 + "\n"
    )
    assert supervise.newest_step(tmp_path / "run") == 60


def test_it_goes_on_with_the_hosts_that_are_left_and_takes_them_back(tmp_path: Path):
    """At most --max-np ranks, on the hosts that the command names by then."""
    hosts = Hosts(tmp_path, 3, ssh_port=22)
    try:
        listed = tmp_path / "listed"
        listed.write_text("node1:1\n  node2 slots=3 # the second\nnode3:1\n")
        hosts.cut(hosts[3])
        script = (
            'paste -sd, "$LAUNCH_HOSTFILE"; grep -q node3 "$LAUNCH_HOSTFILE" && exit 0; '
            'trap "exit 75" USR1; while :; do sleep 0.1; done'
        )
        words = hosts[1].words(
            *SUPERVISE,
            "--hosts-from",
            f"cat {listed}",
            "--min-hosts",
            "2",
            "--max-np",
            "5",
            "--rejoin",
            "2",
            "--pause",
            "1",
            "--",
            "bash",
            "-c",
            script,
        )
        with Terminal(words, ROOT, ENVIRONMENT) as terminal:
            terminal.wait_for(r"going on without node3 \(ssh: .*\), on 2 host", 40)
            terminal.wait_for("node1:1,node2:3", 20)
            listed.write_text("node1:1\nnode3:2\nnode2:3\n")
            hosts.cut(hosts[3], back=True)
            terminal.wait_for("node3", 20)
            terminal.wait_for("node1:1,node3:2,node2:2", 20)
            assert terminal.wait(20) == 0
    finally:
        hosts.end()


_TINY = [sys.executable, "train.py", "--flagfile=configs/demo.cfg", *TINY_FLAGS]
CRASH = """
import os, signal, sys
import hvdkit, train
def crashing(run):
    step = run.make_step(train.make_step)
    for batch in run.batches():
        if run.world.rank == 1:
            os.kill(os.getpid(), signal.SIGABRT)
        run.after_step(step(batch))
sys.exit(hvdkit.main(crashing, train.Settings, sys.argv))
"""
TAKE = """
import pathlib, sys
from hvdkit.checkpoint import lease
lease.take(pathlib.Path(sys.argv[1]))
"""


@pytest.mark.slow
def test_a_native_crash_ends_all_at_once_with_its_trace(tiny: list[str]):
    words = [ROOT / "launch/hosts.sh", "-np", "2", sys.executable, "-c", CRASH]
    ended = run(
        [*words, "--flagfile=configs/demo.cfg", *tiny], 100, cwd=ROOT / "template"
    )
    assert ended.code == 134, ended.output
    # Without the output of rank 0, which comes in between.
    parts = re.findall(r"\[1,1\]<stderr>:(.*?)(?=\[1,[01]\]<std|$)", ended.output, re.S)
    said = "".join(parts)
    assert "Fatal Python error: " in said and ", line 8 in crashing" in said, said
    host = os.uname().nodename
    pattern = rf"rank 1 with PID \d+ on node {host} exited on signal 6"
    assert re.search(pattern, ended.output), ended.output


def test_a_new_start_of_the_same_job_takes_over_and_another_job_does_not(
    tiny, tmp_path: Path
):
    words = [*_TINY, *tiny, "--num_steps=100000", "--log_every=100"]

    def started(job: str) -> Terminal:
        return Terminal(words, ROOT / "template", ENVIRONMENT | {"LAUNCH_JOB": job})

    with started("one") as first:
        first.wait_for("step 100/", 240)
        other = run(
            [sys.executable, "-c", TAKE, tmp_path / "run"], 60, {"LAUNCH_JOB": "two"}
        )
        assert "NotNow: " in other.output and "in use by another run" in other.output, (
            other.output
        )
        with started("one") as second:
            first.wait_for(
                "a later start of this job, on .*, has taken over .* ends, unsaved", 240
            )
            assert first.wait(60) == 76, first.shown
            second.wait_for("step 100/", 240)
            second.press(CTRL_C)
            assert second.wait(60) == 75, second.shown


@pytest.mark.slow
def test_a_host_whose_shell_hangs_is_left_out(tmp_path: Path, answering):
    executable(tmp_path / "ssh", 'case "$*" in *hangs*) sleep 100 ;; esac')
    (tmp_path / "hosts").write_text("sound:1\nhangs:1\n")
    words = [
        *FAST,
        "--hostfile",
        tmp_path / "hosts",
        "--min-hosts",
        "1",
        "--",
        "sh",
        "-c",
    ]
    ended = run([*words, 'cat "$LAUNCH_HOSTFILE"'], 80, answering)
    assert ended.code == 0 and ended.output.splitlines()[-1] == "sound:1", ended.output
    assert "going on without hangs" in ended.output


def test_a_stop_before_anything_was_started_is_no_crash(tmp_path: Path):
    executable(tmp_path / "ssh", f"touch {tmp_path}/asked\nsleep 5")
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    words = [ROOT / "launch/hosts.sh", "-H", "nowhere:1", "true"]
    with subprocess.Popen(words, env=env) as process:
        wait_for((tmp_path / "asked").exists, "no host was asked", 60)
        process.terminate()
        assert process.wait(20) == 75


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_ranks_behind_a_script_are_told(tmp_path: Path, number: int):
    """A shell that runs a script would end alone, and the ranks would run on."""
    ranks = [*STAND_IN, f"--run_dir={tmp_path}", "--steps=1000"]
    script = executable(
        tmp_path / "run.sh",
        f"set -e\n{ROOT}/launch/hosts.sh -np 2 {' '.join(ranks)}\necho never\n",
    )
    words = [*SUPERVISE, "--run-dir", tmp_path, "--", script]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as supervisor:
        wait_for(lambda: list((tmp_path / "checkpoints").glob("step-*")), "no step", 30)
        supervisor.send_signal(number)
        supervisor.wait(30)
    assert supervisor.returncode == 75
    assert (tmp_path / "told-0").exists() and (tmp_path / "told-1").exists()
    left = subprocess.run(["pgrep", "-f", f"[r]un_dir={tmp_path}"], check=False)
    assert left.returncode == 1


def test_as_the_first_process_of_a_container_it_leaves_no_zombies(tmp_path: Path):
    require("unshare")
    alive = ["unshare", "--pid", "--fork", "--mount-proc", "true"]
    if subprocess.run(alive, capture_output=True, check=False).returncode:
        pytest.skip("needs root, for a process table of its own")
    # A process whose parent ends before it; then the table is shown.
    command = "(sleep 0.2 & exit 0); sleep 1; ps -eo stat,comm"
    words = [
        "unshare",
        "--pid",
        "--fork",
        "--mount-proc",
        *SUPERVISE,
        "--",
        "sh",
        "-c",
        command,
    ]
    ended = run(words, 30)
    assert ended.code == 0 and "ps" in ended.output and "Z" not in ended.output, (
        ended.output
    )


def test_a_folder_holds_no_exit_code(tmp_path: Path):
    ended = run([*SUPERVISE, "--ended", tmp_path, "--", "true"], 20)
    assert ended.code == 2 and f"{tmp_path} does not hold an exit code" in ended.output
