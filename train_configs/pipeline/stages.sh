# What the pipelines of this folder share: source stages.sh FOLDER
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
recipes=$here/../../recipes
folder=$1
mkdir -p "$folder/done"
python() { command "${PYTHON:-python}" -P "$@"; }
torchllm() { python -m torchllm "$@"; }

# Run a command, unless it has succeeded before.
stage() { # NAME COMMAND
    local name=$1 begin=$SECONDS
    shift
    if [ -e "$folder/done/$name" ]; then echo "$name: done earlier"; return; fi
    echo "$name:" "$@"
    "$@" </dev/null
    touch "$folder/done/$name"
    echo "$name: done, $((SECONDS - begin)) s"
}

# Talk to a model, in a terminal.
talk() { # CONFIG.toml
    if [ -t 0 ]; then torchllm generate "$1"; else echo "now: torchllm generate $1"; fi
}
