#!/usr/bin/env bash
# Runs a rank on its own share of the cores, those near its GPU where there is one.
#
#   horovodrun -np 8 launch/bind.sh python train.py ...
#   BIND_SHOW=1: prints the cores, one line per rank
#
# Ranks whose GPUs belong to one NUMA node share that node's cores evenly. Without GPUs, all ranks
# of the host share all cores. Memory is bound to the same node if numactl is installed and allowed
# (not in every container). A rank runs unbound if mpirun or Slurm has bound it already, if there are
# fewer cores than ranks, or if binding is not allowed.
set -euo pipefail

sys=${SYS:-/sys} # for tests

# Slurm's tasks on this node, of "8(x2),4": a number for each node or for some in a row.
tasks_here() {
    local part count times node=0
    for part in $(tr , ' ' <<<"${SLURM_STEP_TASKS_PER_NODE:-1}"); do
        IFS='(x)' read -r count _ times _ <<<"$part"
        node=$((node + ${times:-1}))
        if [ "${SLURM_NODEID:-0}" -lt "$node" ]; then echo "$count" && return; fi
    done
}

rank=${HOROVOD_LOCAL_RANK:-${OMPI_COMM_WORLD_LOCAL_RANK:-${SLURM_LOCALID:-0}}}
ranks=${HOROVOD_LOCAL_SIZE:-${OMPI_COMM_WORLD_LOCAL_SIZE:-$(tasks_here)}}

# expand 0-3,8: each number on a line
expand() {
    local part
    for part in ${1//,/ }; do
        seq "${part%-*}" "${part#*-}"
    done
}

allowed=$(sed -n 's/^Cpus_allowed_list:[[:space:]]*//p' /proc/self/status)
mapfile -t cores < <(expand "$allowed")
available=${#cores[@]}
place=$rank sharers=$ranks node=''

# The NUMA node of each GPU, in nvidia-smi's order, which is CUDA's under CUDA_DEVICE_ORDER.
nodes=()
if command -v nvidia-smi >/dev/null && [ -n "${CUDA_VISIBLE_DEVICES-all}" ]; then
    export CUDA_DEVICE_ORDER=PCI_BUS_ID
    while read -r bus; do
        file=$sys/bus/pci/devices/$(tr '[:upper:]' '[:lower:]' <<<"${bus#0000}")/numa_node
        nodes+=("$(cat "$file" 2>/dev/null || echo -1)")
    done < <(nvidia-smi --query-gpu=pci.bus_id --format=csv,noheader 2>/dev/null)
fi
if [[ ${CUDA_VISIBLE_DEVICES:-} =~ ^[0-9]+(,[0-9]+)*$ ]]; then
    chosen=()
    for gpu in ${CUDA_VISIBLE_DEVICES//,/ }; do chosen+=("${nodes[gpu]:--1}"); done
    nodes=("${chosen[@]}")
fi
if [ "${#nodes[@]}" -ge "$ranks" ] && [ "${nodes[rank]}" -ge 0 ]; then
    node=${nodes[rank]} place=0 sharers=0
    for ((i = 0; i < ranks; i++)); do
        if [ "${nodes[i]}" = "$node" ]; then
            if [ "$i" -lt "$rank" ]; then place=$((place + 1)); fi
            sharers=$((sharers + 1))
        fi
    done
    near=$(expand "$(cat "$sys/devices/system/node/node$node/cpulist")")
    mapfile -t cores < <(comm -12 <(printf '%s\n' "${cores[@]}" | sort) <(sort <<<"$near") | sort -n)
fi

share=$((${#cores[@]} / sharers))
# Slurm has bound this task, if it may not use all cores that the job has on this host.
by_slurm=''
if [ -n "${SLURM_STEP_ID:-}" ] && [ "$available" -lt "${SLURM_CPUS_ON_NODE:-0}" ]; then by_slurm=yes; fi
if [ -n "${OMPI_MCA_orte_bound_at_launch:-}${RANK_BOUND:-}$by_slurm" ] || [ "$share" -lt 1 ]; then
    exec "$@"
fi
own=$(IFS=, && echo "${cores[*]:place * share:share}")
[ -z "${BIND_SHOW:-}" ] || echo "local rank $rank of $ranks: cores $own${node:+, NUMA node $node}" >&2

export RANK_BOUND=$own # so that the rank does not divide its cores again
for words in "numactl --physcpubind=$own --preferred=$node --" "taskset --cpu-list $own"; do
    if [ -z "$node" ] && [[ $words == numactl* ]]; then continue; fi
    # shellcheck disable=SC2086 # words
    if $words true 2>/dev/null; then exec $words "$@"; fi
done
unset RANK_BOUND
echo "note: local rank $rank cannot be bound to cores $own here: it runs unbound" >&2
exec "$@"
