#!/usr/bin/env bash
# Starts a recipe on every process of this machine, or of all nodes of a Slurm or Kubernetes job.
#
#   ./run_train.sh [CONFIG.toml] [--section.key=value ...]
#   srun ./run_train.sh CONFIG.toml            Slurm: one task a node, or one task a GPU
#
# NPROC    processes on this node     (default: its GPUs, else 2)
# NNODES   nodes                      (default: 1; under Slurm and Kubernetes: the job's)
#          with --run.dry_run=true: of the run that is looked at, any numbers; default: what the degrees multiply to
# RECIPE   the script to start        (default: recipes/pretrain.py)
#
# SIGTERM or Ctrl-C, or `touch RUN_FOLDER/stop`: the ranks save at the next step boundary and this script ends with
# success. A second signal, 5 s later or more, ends them at once.
set -euo pipefail

fail() { echo "run_train.sh: $*" >&2; exit 2; }

TORCHLLM_LAUNCHED=$(date +%s) # for the account of the run's time
export TORCHLLM_LAUNCHED
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=${PYTHON:-$(command -v python || echo python3)}
# A copy of this script that lies in another folder takes recipes and configs from the installed package.
[ -f "$here/recipes/pretrain.py" ] || here=$("$python" -c "from torchllm.resources import HOME; print(HOME)")
recipe=${RECIPE:-$here/recipes/pretrain.py}
[ -f "$recipe" ] || fail "RECIPE=$recipe: there is no such file"
if [ $# = 0 ] || [ "${1#--}" != "$1" ]; then set -- "$here/train_configs/debug.toml" "$@"; fi

gpus() {
    if [ -n "${CUDA_VISIBLE_DEVICES+set}" ]; then
        echo "$CUDA_VISIBLE_DEVICES" | tr ',' '\n' | grep -c '^[^-[:space:]]' || true
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
    # The step's numbers: the job's are others where a step takes some of its nodes.
    NNODES=$SLURM_STEP_NUM_NODES node_rank=$SLURM_NODEID
    head=$(scontrol show hostnames "$SLURM_STEP_NODELIST" | head -n 1)
    port=$((20000 + SLURM_JOB_ID % 20000))
    if [ "$SLURM_STEP_NUM_TASKS" -gt "$NNODES" ]; then
        [[ $SLURM_STEP_TASKS_PER_NODE =~ ^([0-9]+)(\(x[0-9]+\))?$ ]] || fail "$SLURM_STEP_NUM_TASKS tasks on $NNODES \
nodes, $SLURM_STEP_TASKS_PER_NODE: use the same number on each (--ntasks-per-node), or one task a node"
        per_gpu=1 NPROC=${BASH_REMATCH[1]} node_rank=$SLURM_PROCID
        export LOCAL_RANK=$SLURM_LOCALID # one task of a node speaks of the config
    fi
elif [ "${SLURM_NNODES:-1}" -gt 1 ]; then
    fail "this is Slurm's batch script, which runs on one of $SLURM_NNODES nodes: start me with srun ./run_train.sh"
fi
if [ -z "${NPROC:-}" ]; then
    NPROC=$(gpus)
    [ "$NPROC" -gt 0 ] || NPROC=2
    export NPROC_IS_DEFAULT=1 # to a dry run, which is of any number of processes
fi
export NPROC NNODES=${NNODES:-1}
[ "$NNODES" = 1 ] || [ -n "$head" ] || [[ " $* " == *" --run.dry_run=true "* ]] || fail "NNODES=$NNODES, but not under \
Slurm or Kubernetes: set PET_NNODES, PET_NODE_RANK, PET_MASTER_ADDR and PET_MASTER_PORT, torchrun's own variables, on \
every node"
for word in "$@"; do # nothing to start
    case $word in --help | -h | --check) exec env -u WORLD_SIZE -u RANK "$python" "$recipe" "$@" ;; esac
done

# One process reads the config: what is wrong with it is said once, before anything is started.
status=0
said=$(env -u WORLD_SIZE -u RANK "$python" "$recipe" "$@" --check 2>&1) || status=$?
if [ "$status" != 0 ]; then
    echo "$said" >&2
    exit "$status"
fi
sample=0 folder="" dry_run=0
while IFS= read -r line; do
    case $line in
        NPROC=*) NPROC=${line#*=} ;;
        RUN_FOLDER=*) folder=${line#*=} ;;
        SAMPLE=*) sample=${line#*=} ;;
        DRY_RUN=*) dry_run=${line#*=} ;;
        *) [ "$node_rank" != 0 ] || echo "$line" >&2 ;;
    esac
done <<<"$said"
if [ "$dry_run" = 1 ]; then # one process speaks for all
    [ "$node_rank" = 0 ] || exit 0
    exec env -u WORLD_SIZE -u RANK "$python" "$recipe" "$@"
fi
set -- "$@" "--run.folder=$folder"
marker=$folder/stopped.json request=$folder/stop
[ "$node_rank" != 0 ] || rm -f "$marker" "$request" # of the run before

if [ -z "${OMP_NUM_THREADS:-}" ]; then
    cores=$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN || echo 1)
    export OMP_NUM_THREADS=$((cores > NPROC ? cores / NPROC : 1))
fi

if [ "$per_gpu" = 1 ]; then # Slurm started the ranks: be one
    export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_STEP_NUM_TASKS LOCAL_WORLD_SIZE=$NPROC
    export MASTER_ADDR=$head MASTER_PORT=$port
    command=("$python" "$recipe" "$@")
else
    launch=("$python" -m torchllm.runtime.launch --nproc-per-node="$NPROC") # torchrun
    if [ "$NNODES" = 1 ]; then
        launch+=(--standalone)
    else
        launch+=(--nnodes="$NNODES" --node-rank="$node_rank" --master-addr="$head" --master-port="$port")
    fi
    command=("${launch[@]}" "$recipe" "$@")
fi

# A signal becomes a file in the run folder, which rank 0 looks for at each step: unlike a signal it waits for ranks that
# are still starting. The processes below ignore the signal, for a terminal and Slurm send it to them too; each rank
# stops ignoring it when it is ready to save.
child="" told="" signals=0
stop() {
    signals=$((signals + 1))
    if [ -z "$told" ]; then
        told=$SECONDS
        mkdir -p "$folder" && : >"$request"
        [ "$node_rank" != 0 ] || echo "stopping: the ranks save at the next step boundary; again ends them at once" >&2
    elif [ $((SECONDS - told)) -gt 5 ]; then
        kill -USR2 "$child"
    fi
}
trap stop TERM INT HUP
(trap '' TERM INT HUP && exec "${command[@]}") &
child=$!
seen=-1
while [ "$seen" != "$signals" ]; do # a signal ends `wait`, not the child; of a child that has ended bash knows the status
    seen=$signals status=0
    wait "$child" || status=$?
done
trap - TERM INT HUP
if [ -e "$marker" ]; then
    [ "$node_rank" != 0 ] || echo "stopped early, with a checkpoint; the same command with --run.folder=$folder goes on"
    exit 0
fi
if [ "$status" != 0 ] || [ -n "$told" ] || [ "$sample" = 0 ] || [ "$node_rank" != 0 ]; then exit "$status"; fi
unset RANK WORLD_SIZE
exec "$python" "$here/recipes/generate.py" "$folder/config.toml" --checkpoint.resume=auto
