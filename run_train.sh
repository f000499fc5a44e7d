#!/usr/bin/env bash
# Start a recipe on all processes of this machine, or of all nodes of a Slurm or Kubernetes job.
#
#   ./run_train.sh [CONFIG.toml] [--section.key=value ...]
#   srun ./run_train.sh CONFIG.toml            Slurm: one task per node, or one task per GPU; mpirun: the same
#
# NPROC    processes on this node     (default: its number of GPUs, or 2 without a GPU)
# NNODES   number of nodes            (default: 1; under a scheduler: the job's; with --check also 2-4)
#          With --run.dry_run=true both describe the run that is examined; default: the product of its degrees. A dry
#          run and --check also take --gpus=N, the number of all processes.
# RECIPE   the script to start        (default: recipes/pretrain.py)
#
# SIGTERM, SIGUSR1, SIGUSR2, SIGHUP, Ctrl-C and `touch RUN_FOLDER/stop`, however often, ask the run to stop: the ranks
# save at the next step boundary, and this script ends with run.stopped_exit_status. A run that has not taken a step ends
# where it is. A second Ctrl-C, at least 5 s after the first, or SIGQUIT ends all ranks at once, without saving.
#
# Exit status: 0 done; run.stopped_exit_status (default 0) stopped as asked; 1 failed; 2 refused before anything was
# touched; 128 + N ended by signal N before the config was checked, or at once.
set -euo pipefail
# A daemon may start it without descriptors: the first file that is opened would be its input or output.
: >&2 || exec 2>/dev/null
: <&0 || exec </dev/null
: >&1 || exec >/dev/null
trap '' PIPE # an output that nobody reads any more is no reason to end: `echo` fails, and says nothing

fail() { echo "run_train.sh: $*" >&2; exit 2; }
say() { echo "$*" 2>/dev/null || true; } # the terminal may be closed

# Standard error for `on_signal`, which may run where a line below leaves out descriptor 2.
exec 9>&2 || exec 9>/dev/null

# A signal becomes a file in the run folder, which rank 0 looks for: unlike a signal, the file is still there when ranks
# that are starting are ready. A terminal and Slurm signal the child processes too, which therefore ignore it.
child="" is_training="" request="" is_requested="" interrupted_at="" end_at_once=QUIT ended_at_once=""
on_signal() { # NAME
    if ! is_owner; then
        trap '' TERM INT HUP USR1 USR2
        if [ -n "$child" ]; then { kill -KILL "$child" && wait "$child"; } 2>/dev/null || true; fi
        say "run_train.sh: ended by SIG$1 before anything was started" >&9
        exit $((128 + $(kill -l "$1")))
    fi
    if [ "$1" = INT ] && [ -z "$interrupted_at" ]; then
        interrupted_at=$SECONDS
    elif [ "$1" = QUIT ] || { [ "$1" = INT ] && [ $((SECONDS - interrupted_at)) -gt 5 ]; }; then
        ended_at_once=1
        kill "-$end_at_once" "$child" 2>/dev/null || true
    fi
    [ -z "$is_requested" ] || return 0
    if { [ -d "$folder" ] || mkdir -p "$folder"; } && : >"$request"; then
        is_requested=1
        [ "$process" = 0 ] || : >"$report" # for its launcher: the folder may hold a request to an earlier job
        local at_once=""
        [ "$1" != INT ] || at_once="; a second Ctrl-C ends them at once"
        [ "$process" != 0 ] || say "stopping: the ranks save at the next step boundary$at_once" >&9
    else
        say "run_train.sh: cannot create $request, so the run goes on" >&9
    fi
}

# Whether the file would stop this job: until node 0 owns the run folder (torchllm/tools/launch/lease.py), another job may.
# Without a child process: Slurm signals all processes of a step, several times, and one would die of the next signal.
is_owner() {
    local file owner
    [ -n "$is_training" ] || return 1
    [ "$process" = 0 ] || return 0
    for file in "$folder"/lease/[0-9]*; do
        owner=""
        read -r owner 2>/dev/null <"$file" || true
        [[ $owner != *"\"launched\": \"$TORCHLLM_LAUNCHED\""* ]] || return 0
    done
    return 1
}
handle_signals() {
    trap 'on_signal TERM' TERM
    trap 'on_signal INT' INT
    trap 'on_signal HUP' HUP
    trap 'on_signal USR1' USR1
    trap 'on_signal USR2' USR2
    trap - QUIT
}
handle_signals

trap : KILL # nothing catches it, but bash then prints no line of its own about a child process that was killed

# Start a command in the background, as $child. It ignores the signals from its first instruction, and ends with this
# script, even if that is killed (torchllm/runtime/parent.py).
start() {
    (trap '' TERM INT HUP USR1 USR2 && TORCHLLM_PARENT=$$ exec "$@") &
    child=$!
}

# Wait for $child and set $status. WORK, if given, is printed after a second and every ten: Python starts slowly on some
# disks. FOOTGUN: `wait` is called only when the child has ended and signals are ignored. Bash 5.2 confuses the status of
# a child with that of a `wait` that a signal ends, and loses it if both happen at once.
wait_for_child() { # [WORK]
    local looks=0 pause=0.05
    while kill -0 "$child" 2>/dev/null; do
        # Bash would print a line if a signal kills this process in its first instructions.
        { (trap '' TERM INT HUP USR1 USR2 && exec sleep "$pause") || true; } 2>/dev/null
        looks=$((looks + 1))
        [ "$looks" -lt 18 ] || pause=0.2
        [ -z "${1-}" ] || [ $((looks % 50)) != 18 ] || [ "$process" != 0 ] || say "$1: $SECONDS s so far" >&2
    done
    trap '' TERM INT HUP QUIT USR1 USR2
    status=0
    wait "$child" || status=$?
    [ "$status" -le 128 ] || [ -n "$ended_at_once" ] || say "run_train.sh: its process $child was killed, and all that \
it had started: SIG$(kill -l "$status"); dmesg says so if memory was short" >&2
}

# The run's goodput counts from here. Bash before 5, as on macOS, knows whole seconds only.
launched=${EPOCHREALTIME:-$(date +%s)}
export TORCHLLM_LAUNCHED=${launched/,/.} # some locales write a decimal comma
script=$(readlink -f -- "${BASH_SOURCE[0]}" || echo "${BASH_SOURCE[0]}") # a link to it is the same script
here=$(CDPATH="" cd -- "$(dirname -- "$script")" && pwd)
python=${PYTHON:-$(command -v python || echo python3)}
command -v "$python" >/dev/null || fail "$python: no such program; set PYTHON to the interpreter that has torchllm"
unset PYTHONINSPECT # it would keep each process open
# A copy of this script that lies in another folder takes recipes and configs from the installed package.
[ -f "$here/recipes/pretrain.py" ] || here=$("$python" -P -c "from torchllm.tools.resources import HOME; print(HOME)")
recipe=${RECIPE:-$here/recipes/pretrain.py}
[ -f "$recipe" ] || fail "RECIPE=$recipe: no such file"
if [ $# = 0 ] || [ "${1#--}" != "$1" ]; then set -- "$here/train_configs/debug.toml" "$@"; fi

# The nodes, and the place of this process. With one task per GPU local_rank says which rank this is; else it is empty.
# Of all processes with this script the one with process = 0 speaks.
node=0 head="" port="" job="" local_rank="" cores=1
process=${SLURM_PROCID:-${OMPI_COMM_WORLD_RANK:-${PMI_RANK:-${PET_NODE_RANK:-${RANK:-0}}}}} # until it is known
if [ ! -w "${TMPDIR:-/tmp}" ]; then
    [ "$process" != 0 ] || say "TMPDIR=${TMPDIR:-/tmp} is no folder that can be written: using /tmp" >&2
    export TMPDIR=/tmp
fi
# By mktemp: a name that another user could guess would be theirs to fill.
report=$(mktemp) || fail "no temporary file can be made in TMPDIR=${TMPDIR:-/tmp}"
trap 'rm -f "$report"' EXIT
work="starting $recipe, reading its config"
start "$python" -P -m torchllm.tools.launch.job >"$report"
wait_for_child "$work"
child=""
handle_signals
[ "$status" = 0 ] || exit "$status"
while IFS= read -r line; do
    case $line in
        NPROC=*) NPROC=${line#*=} ;;
        NPROC_IS_DEFAULT=*) export NPROC_IS_DEFAULT=1 ;; # a dry run may be of any number of processes then
        NNODES=*) NNODES=${line#*=} ;;
        NODE=*) node=${line#*=} ;;
        PROCESS=*) process=${line#*=} ;;
        HEAD=*) head=${line#*=} ;;
        PORT=*) port=${line#*=} ;;
        JOB=*) job=${line#*=} ;;
        LOCAL_RANK=*) local_rank=${line#*=} ;;
        CORES=*) cores=${line#*=} ;;
    esac
done <"$report"
export NPROC NNODES
# They may number pods, or be left over from another job. One task per node prints messages about the config.
unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE PER_RANK
[ -z "$local_rank" ] || export LOCAL_RANK=$local_rank PER_RANK=1
for word in "$@"; do # these start nothing
    case $word in --help | -h | --check) rm -f "$report" && exec "$python" "$recipe" "$@" ;; esac
done
[ "$NNODES" = 1 ] || [ -n "$head" ] || [[ " $* " == *" --run.dry_run=true "* ]] || fail "NNODES=$NNODES outside \
Slurm and Kubernetes: set PET_NNODES, PET_NODE_RANK, PET_MASTER_ADDR and PET_MASTER_PORT, torchrun's own variables, on \
every node"

# One process checks the config, so that each error is printed once, before anything is started.
TORCHLLM_CONFIG=$(mktemp) || fail "no temporary file can be made in TMPDIR=${TMPDIR:-/tmp}"
export TORCHLLM_CONFIG # what --check has read, for the ranks: they check nothing again
trap 'rm -f "$report" "$TORCHLLM_CONFIG"' EXIT
PYTHONIOENCODING="" start "$python" "$recipe" "$@" --check >"$report" 2>&1 # paths come back as they were given
wait_for_child "$work"
child=""
handle_signals
if [ "$status" != 0 ]; then
    cat "$report" >&2 || true
    exit "$status"
fi
sample=0 folder="" dry_run=0 restarts=0 start_timeout="" on_event="" stopped_exit_status=0
while IFS= read -r line; do
    case $line in
        NPROC=*) NPROC=${line#*=} ;;
        RUN_FOLDER=*) folder=${line#*=} ;;
        SAMPLE=*) sample=${line#*=} ;;
        DRY_RUN=*) dry_run=${line#*=} ;;
        RESTARTS=*) restarts=${line#*=} ;;
        START_TIMEOUT=*) start_timeout=${line#*=} ;;
        STOPPED_EXIT_STATUS=*) stopped_exit_status=${line#*=} ;;
        ON_EVENT=*) on_event=${line#*=} ;;
        *) [ "$process" != 0 ] || say "$line" >&2 ;;
    esac
done <"$report"
rm -f "$report"
if [ "$dry_run" = 1 ]; then # one process examines all ranks
    [ "$process" = 0 ] || exit 0
    rm -f "$TORCHLLM_CONFIG"
    exec "$python" "$recipe" "$@"
fi
words=() # the folder as the check has read it: without ~, or with the name that it has made
for word in "$@"; do [ "${word#--run.folder=}" != "$word" ] || words+=("$word"); done
set -- "${words[@]}" "--run.folder=$folder"
marker=$folder/stopped.json request=$folder/stop

if [ -z "${OMP_NUM_THREADS:-}" ]; then
    export OMP_NUM_THREADS=$((cores > NPROC ? cores / NPROC : 1))
fi
# A GPU's allocator then grows its segments instead of leaving gaps between them.
[ -n "${PYTORCH_CUDA_ALLOC_CONF:-}" ] || export PYTORCH_ALLOC_CONF="${PYTORCH_ALLOC_CONF:-expandable_segments:True}"
if [ -n "$local_rank" ]; then # this is one rank of those that Slurm or mpirun has started
    [ "$LOCAL_RANK" -lt "$NPROC" ] || exit 0 # run.lower_ranks
    export RANK=$((node * NPROC + LOCAL_RANK)) WORLD_SIZE=$((NNODES * NPROC)) LOCAL_WORLD_SIZE=$NPROC
    export MASTER_ADDR=$head MASTER_PORT=$port
    [ "$process" != 0 ] || say "starting $recipe on $WORLD_SIZE processes, this node is $HOSTNAME: importing torch" >&2
    [ "$restarts" = 0 ] || [ "$process" != 0 ] || say "one task per GPU: no rank is started again in the job; after a \
failure let Slurm start it again (--requeue, srun --kill-on-bad-exit=1)" >&2
    command=("$python" "$recipe" "$@") end_at_once=KILL # a shell makes its background processes ignore SIGQUIT
else
    launch=("$python" -P -m torchllm.tools.launch.launch --nproc-per-node="$NPROC")
    if [ "$NNODES" -gt 1 ]; then
        launch+=(--nnodes="$NNODES" --rdzv-endpoint="$head:$port" --node-rank="$process")
        stop_file=$request
        [ "$process" = 0 ] || stop_file=$report
        launch+=(--stop-file="$stop_file")
        [ -z "$job" ] || launch+=(--rdzv-id="$job")
    fi
    launch+=(--restarts="$restarts" --run-folder="$folder" --start-timeout="$start_timeout")
    [ "$process" != 0 ] || [ -z "$on_event" ] || launch+=(--on-event="$on_event")
    [ "$process" != 0 ] || export TORCHLLM_TAKE_LEASE=$folder # no second job writes there
    command=("${launch[@]}" "$recipe" "$@")
fi

is_training=1
start "${command[@]}"
trap 'on_signal QUIT' QUIT
wait_for_child # and ignore signals from here on: what follows takes seconds
if [ -n "$on_event" ] && [ "$process" = 0 ]; then "$python" -P -m torchllm.tools.launch.on_event "$on_event" "$folder" || true; fi
# A node that waits for node 0 may have no marker.
if [ "$status" = 3 ] && [ "$process" != 0 ] && [ -z "$local_rank" ]; then exit "$stopped_exit_status"; fi
if [ "$status" != 2 ] && [ -e "$marker" ] && is_owner; then # else it is another job's
    what="with a checkpoint"
    if grep -q null "$marker"; then # steps of an attempt that has failed may be lost
        what="with no checkpoint: the next start begins at step 1"
        ! compgen -G "$folder/checkpoints/*/manifest.json" >/dev/null || what="in the start-up, with an earlier checkpoint"
    fi
    [ "$process" != 0 ] || say "stopped early, $what; to continue, run the same command with \
--run.folder=$(printf %q "$folder")"
    exit "$stopped_exit_status"
fi
if [ "$status" != 0 ] || [ -n "$is_requested" ] || [ "$process" != 0 ]; then exit "$status"; fi
unset RANK WORLD_SIZE
trap - TERM INT HUP QUIT
rm -f "$TORCHLLM_CONFIG"
if [ "$sample" = 1 ]; then
    say "a sample of the last checkpoint:" >&2
    generate=("$python" "$here/recipes/generate.py" "$folder/config.toml" --checkpoint.resume=auto)
    text=$("${generate[@]}" </dev/null) || status=$? # a chat would read the standard input
    [ -z "$text" ] || say "$text"
    { echo "$text" >"$folder/sample.txt"; } 2>/dev/null || true
fi
if [ -e "$folder/metrics.jsonl" ]; then
    name=$(printf %q "$folder")
    say "the run is in $name; next, for example:
  tensorboard --logdir $name/tensorboard
  torchllm generate $name" >&2
fi
exit "$status"
