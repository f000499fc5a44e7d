#!/usr/bin/env bash
# Starts a recipe on every process of this machine, or of all nodes of a Slurm or Kubernetes job.
#
#   ./run_train.sh [CONFIG.toml] [--section.key=value ...]
#   srun ./run_train.sh CONFIG.toml            Slurm: one task a node, or one task a GPU
#
# NPROC    processes on this node     (default: its GPUs, else 2)
# NNODES   nodes                      (default: 1; under Slurm and Kubernetes: the job's)
# RECIPE   the script to start        (default: recipes/pretrain.py)
set -euo pipefail

fail() { echo "run_train.sh: $*" >&2; exit 2; }

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
recipe=${RECIPE:-$here/recipes/pretrain.py}
[ -f "$recipe" ] || fail "RECIPE=$recipe: there is no such file"
python=${PYTHON:-python}
command -v "$python" >/dev/null || python=python3
if [ $# = 0 ] || [ "${1#--}" != "$1" ]; then set -- "$here/train_configs/debug.toml" "$@"; fi

gpus() {
    if [ -n "${CUDA_VISIBLE_DEVICES+set}" ]; then
        echo "$CUDA_VISIBLE_DEVICES" | tr ',' '\n' | grep -c '[^[:space:]]' || true
    elif command -v nvidia-smi >/dev/null; then
        nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true
    else
        echo 0
    fi
}

# Who the nodes are. Each scheduler's words become NNODES, node_rank and head (rank 0's host).
node_rank=0 head="" port=29500 per_gpu=0
if [ -n "${PET_NNODES:-}" ]; then # Kubernetes operators speak to torchrun through PET_ variables
    [[ $PET_NNODES =~ ^[0-9]+$ ]] || fail "PET_NNODES=$PET_NNODES: only a fixed number of nodes"
    NNODES=$PET_NNODES node_rank=${PET_NODE_RANK:-0} head=${PET_MASTER_ADDR:-} port=${PET_MASTER_PORT:-$port}
    case ${PET_NPROC_PER_NODE:-auto} in auto | gpu | cpu) ;; *) NPROC=$PET_NPROC_PER_NODE ;; esac
    unset RANK WORLD_SIZE # of the pods, not of the processes
elif [ -n "${SLURM_STEP_ID:-}" ]; then
    NNODES=$SLURM_NNODES node_rank=$SLURM_NODEID
    head=$(scontrol show hostnames "$SLURM_STEP_NODELIST" | head -n 1)
    port=$((20000 + SLURM_JOB_ID % 20000))
    if [ "$SLURM_NTASKS" -gt "$SLURM_NNODES" ]; then
        [ $((SLURM_NTASKS % SLURM_NNODES)) = 0 ] || fail "$SLURM_NTASKS tasks on $SLURM_NNODES nodes: use the same \
number on each (--ntasks-per-node), or one task a node"
        per_gpu=1 NPROC=$((SLURM_NTASKS / SLURM_NNODES))
    fi
elif [ "${SLURM_NNODES:-1}" -gt 1 ]; then
    fail "this is Slurm's batch script, which runs on one of $SLURM_NNODES nodes: start me with srun ./run_train.sh"
fi
if [ -z "${NPROC:-}" ]; then
    NPROC=$(gpus)
    [ "$NPROC" -gt 0 ] || NPROC=2
fi
export NPROC NNODES=${NNODES:-1}
[ "$NNODES" = 1 ] || [ -n "$head" ] || fail "NNODES=$NNODES, but not under Slurm or Kubernetes: set PET_NNODES, \
PET_NODE_RANK, PET_MASTER_ADDR and PET_MASTER_PORT, torchrun's own variables, on every node"

# One process reads the config: what is wrong with it is said once, before anything is started.
checked=$(env -u WORLD_SIZE -u RANK "$python" "$recipe" "$@" --check) || exit $?
while IFS='=' read -r key value; do
    case $key in NPROC) NPROC=$value ;; RUN_FOLDER) folder=$value ;; SAMPLE) sample=$value ;; esac
done <<<"$checked"
set -- "$@" "--run.folder=$folder"
marker=$folder/stopped.json

if [ -z "${OMP_NUM_THREADS:-}" ]; then
    cores=$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 1)
    export OMP_NUM_THREADS=$((cores > NPROC ? cores / NPROC : 1))
fi

if [ "$per_gpu" = 1 ]; then # Slurm started the ranks: be one
    export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID MASTER_ADDR=$head MASTER_PORT=$port
    node_rank=$SLURM_PROCID
    command=("$python" "$recipe" "$@")
else
    export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=3600 # its 30 s between TERM and KILL would cut a large checkpoint off
    launch=("$python" -m torch.distributed.run --nproc-per-node="$NPROC")
    if [ "$NNODES" = 1 ]; then
        launch+=(--standalone)
    else
        launch+=(--nnodes="$NNODES" --node-rank="$node_rank" --master-addr="$head" --master-port="$port")
    fi
    command=("${launch[@]}" "$recipe" "$@")
fi

# A TERM or INT goes to the ranks, which save at the next step boundary; then this script ends with success, for
# torchrun itself reports failure even when every rank saved.
"${command[@]}" &
child=$!
trap 'kill -TERM $child 2>/dev/null || true' TERM INT
status=0
wait "$child" || status=$?
while kill -0 "$child" 2>/dev/null; do # a signal ends `wait`, not the child
    status=0
    wait "$child" || status=$?
done
if [ -e "$marker" ]; then
    [ "$node_rank" != 0 ] || echo "stopped early, with a checkpoint; the same command with --run.folder=$folder goes on"
    exit 0
fi
[ "$status" = 0 ] || exit "$status"
if [ "${sample:-0}" = 1 ] && [ "$node_rank" = 0 ]; then
    unset RANK WORLD_SIZE
    "$python" "$here/recipes/generate.py" "$folder/config.toml" --checkpoint.resume=auto
fi
