#!/usr/bin/env bash
# Start a recipe on all processes of this machine, or of all nodes of a Slurm or Kubernetes job.
#
#   ./run_train.sh [CONFIG.toml] [--section.key=value ...]
#   srun ./run_train.sh CONFIG.toml            Slurm: one task per node, or one task per GPU
#
# NPROC    processes on this node     (default: its number of GPUs, or 2 without a GPU)
# NNODES   number of nodes            (default: 1; under Slurm and Kubernetes: the job's)
#          With --run.dry_run=true both describe the run that is examined; default: the product of its degrees.
# RECIPE   the script to start        (default: recipes/pretrain.py)
#
# After SIGTERM, Ctrl-C or `touch RUN_FOLDER/stop` the ranks save at the next step boundary, and this script ends with
# status 0. A second signal, at least 5 s later, ends them at once.
#
# Exit status: 0 done, or stopped with a checkpoint; 1 failed; 2 refused before anything was touched.
set -euo pipefail
trap '' PIPE # an output that nobody reads any more is no reason to end: `echo` fails, and says nothing

fail() { echo "run_train.sh: $*" >&2; exit 2; }
say() { echo "$*" 2>/dev/null || true; } # the terminal may be closed

# The run's goodput counts from here. Bash before 5, as on macOS, knows whole seconds only.
launched=${EPOCHREALTIME:-$(date +%s)}
export TORCHLLM_LAUNCHED=${launched/,/.} # some locales write a decimal comma
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=${PYTHON:-$(command -v python || echo python3)}
# A copy of this script that lies in another folder takes recipes and configs from the installed package.
[ -f "$here/recipes/pretrain.py" ] || here=$("$python" -c "from torchllm.resources import HOME; print(HOME)")
recipe=${RECIPE:-$here/recipes/pretrain.py}
[ -f "$recipe" ] || fail "RECIPE=$recipe: no such file"
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

# The nodes. The variables of each scheduler become NNODES, node_rank and head, the host of rank 0.
node_rank=0 head="" port=29500 per_gpu=0
if [ -n "${PET_NNODES:-}" ]; then # Kubernetes operators configure torchrun through PET_ variables
    [[ $PET_NNODES =~ ^[0-9]+$ ]] || fail "PET_NNODES=$PET_NNODES: must be a fixed number of nodes"
    NNODES=$PET_NNODES node_rank=${PET_NODE_RANK:-0} head=${PET_MASTER_ADDR:-} port=${PET_MASTER_PORT:-$port}
    case ${PET_NPROC_PER_NODE:-auto} in auto | gpu | cpu) ;; *) NPROC=$PET_NPROC_PER_NODE ;; esac
    unset RANK WORLD_SIZE # they number the pods, not the processes
elif [ -n "${SLURM_STEP_ID:-}" ]; then
    # The numbers of the step, not of the job: a step may use only some of the job's nodes.
    NNODES=$SLURM_STEP_NUM_NODES node_rank=$SLURM_NODEID
    head=$(scontrol show hostnames "$SLURM_STEP_NODELIST" | head -n 1)
    port=$((20000 + SLURM_JOB_ID % 20000))
    if [ "$SLURM_STEP_NUM_TASKS" -gt "$NNODES" ]; then
        [[ $SLURM_STEP_TASKS_PER_NODE =~ ^([0-9]+)(\(x[0-9]+\))?$ ]] || fail "$SLURM_STEP_NUM_TASKS tasks on $NNODES \
nodes, $SLURM_STEP_TASKS_PER_NODE: use the same number on each node (--ntasks-per-node), or one task per node"
        per_gpu=1 NPROC=${BASH_REMATCH[1]} node_rank=$SLURM_PROCID
        export LOCAL_RANK=$SLURM_LOCALID # one task per node prints messages about the config
    fi
elif [ "${SLURM_NNODES:-1}" -gt 1 ]; then
    fail "this is Slurm's batch script, which runs on only one of $SLURM_NNODES nodes: use srun ./run_train.sh"
fi
if [ -z "${NPROC:-}" ]; then
    NPROC=$(gpus)
    [ "$NPROC" -gt 0 ] || NPROC=2
    export NPROC_IS_DEFAULT=1 # a dry run ignores it then: it may be of any number of processes
fi
export NPROC NNODES=${NNODES:-1}
[ "$NNODES" = 1 ] || [ -n "$head" ] || [[ " $* " == *" --run.dry_run=true "* ]] || fail "NNODES=$NNODES outside \
Slurm and Kubernetes: set PET_NNODES, PET_NODE_RANK, PET_MASTER_ADDR and PET_MASTER_PORT, torchrun's own variables, on \
every node"
for word in "$@"; do # these start nothing
    case $word in --help | -h | --check) exec env -u WORLD_SIZE -u RANK "$python" "$recipe" "$@" ;; esac
done

# One process checks the config, so that each error is printed once, before anything is started.
status=0
report=$(env -u WORLD_SIZE -u RANK "$python" "$recipe" "$@" --check 2>&1) || status=$?
if [ "$status" != 0 ]; then
    say "$report" >&2
    exit "$status"
fi
sample=0 folder="" dry_run=0 on_event=""
while IFS= read -r line; do
    case $line in
        NPROC=*) NPROC=${line#*=} ;;
        RUN_FOLDER=*) folder=${line#*=} ;;
        SAMPLE=*) sample=${line#*=} ;;
        DRY_RUN=*) dry_run=${line#*=} ;;
        ON_EVENT=*) on_event=${line#*=} ;;
        *) [ "$node_rank" != 0 ] || say "$line" >&2 ;;
    esac
done <<<"$report"
if [ "$dry_run" = 1 ]; then # one process examines all ranks
    [ "$node_rank" = 0 ] || exit 0
    exec env -u WORLD_SIZE -u RANK "$python" "$recipe" "$@"
fi
set -- "$@" "--run.folder=$folder"
marker=$folder/stopped.json request=$folder/stop
[ "$node_rank" != 0 ] || rm -f "$marker" "$request" # left by an earlier run

if [ -z "${OMP_NUM_THREADS:-}" ]; then
    cores=$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN || echo 1)
    export OMP_NUM_THREADS=$((cores > NPROC ? cores / NPROC : 1))
fi

if [ "$per_gpu" = 1 ]; then # Slurm has started one task per rank: this is one
    export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_STEP_NUM_TASKS LOCAL_WORLD_SIZE=$NPROC
    [ "$NNODES" != 1 ] || head=127.0.0.1 # nothing on this node listens to others
    export MASTER_ADDR=$head MASTER_PORT=$port
    command=("$python" "$recipe" "$@")
else
    launch=("$python" -m torchllm.runtime.launch --nproc-per-node="$NPROC") # torchrun
    if [ "$NNODES" -gt 1 ]; then
        launch+=(--nnodes="$NNODES" --rdzv-endpoint="$head:$port" --rdzv-conf="rank=$node_rank")
    fi
    [ "$node_rank" != 0 ] || export TORCHLLM_TAKE_LEASE=$folder # no second job writes there
    command=("${launch[@]}" "$recipe" "$@")
fi

# A signal becomes a file in the run folder, which rank 0 looks for at each step: unlike a signal, the file is still there
# when ranks that are starting are ready. The child processes ignore the signal, because a terminal and Slurm send it to
# them too; each rank stops ignoring it when it is ready to save.
child="" stopping_since="" signals=0
stop() {
    signals=$((signals + 1))
    if [ -z "$stopping_since" ]; then
        stopping_since=$SECONDS
        mkdir -p "$folder" && : >"$request"
        [ "$node_rank" != 0 ] || say "stopping: the ranks save at the next step boundary; a second signal ends them at once" >&2
    elif [ $((SECONDS - stopping_since)) -gt 5 ]; then
        kill -USR2 "$child"
    fi
}
trap stop TERM INT HUP
# They end with this script, even if it is killed (torchllm/runtime/parent.py).
(trap '' TERM INT HUP && TORCHLLM_PARENT=$$ exec "${command[@]}") &
child=$!
signals_before=-1
while [ "$signals_before" != "$signals" ]; do # a signal ends `wait`, not the child: wait again
    signals_before=$signals status=0
    wait "$child" || status=$?
done
trap - TERM INT HUP
if [ -n "$on_event" ] && [ "$node_rank" = 0 ]; then "$python" -m torchllm.runtime.on_event "$on_event" "$folder" || true; fi
if [ -e "$marker" ]; then
    [ "$node_rank" != 0 ] || say "stopped early, with a checkpoint; to continue, run the same command with --run.folder=$folder"
    exit 0
fi
if [ "$status" != 0 ] || [ -n "$stopping_since" ] || [ "$sample" = 0 ] || [ "$node_rank" != 0 ]; then exit "$status"; fi
unset RANK WORLD_SIZE
exec "$python" "$here/recipes/generate.py" "$folder/config.toml" --checkpoint.resume=auto
