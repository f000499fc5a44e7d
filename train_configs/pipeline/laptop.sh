#!/usr/bin/env bash
# From nothing to a model that answers, offline, on two CPU cores: it learns Python's standard library and then to say, for a
# name of it, the first sentence of its docstring. docs/pipeline.md shows what comes out.
#
#   torchllm pipeline laptop [FOLDER]      or bash train_configs/pipeline/laptop.sh; FOLDER of all results: runs/laptop
#
# The same command goes on where it was stopped. To make a stage anew, remove FOLDER/done/STAGE and FOLDER/STAGE.
# A pipeline of yours is a copy of this file.
source "$(dirname "${BASH_SOURCE[0]}")/stages.sh" "${1:-runs/laptop}"
laptop=$here/laptop
text=(--data.sources.0.kind=jsonl --data.sources.0.path="$folder/corpus/text.jsonl")
tokenizer=--data.tokenizer=$folder/tokenizer/tokenizer.json

stage corpus python "$laptop/docstrings.py" "$folder/corpus"
stage tokenizer torchllm tokenizer "$laptop/pretrain.toml" --tokenizer.folder="$folder/tokenizer" \
    --tokenizer.size=4096 --data.tokenizer=bytes "${text[@]}"
stage prepare torchllm prepare "$laptop/pretrain.toml" --prepare.folder="$folder/prepare" "$tokenizer" "${text[@]}"
stage pretrain torchllm train "$laptop/pretrain.toml" --run.folder="$folder/pretrain" "$tokenizer" \
    --data.sources.0.path="$folder/prepare/0-jsonl-text"
stage validate torchllm evaluate "$folder/pretrain/config.toml"
RECIPE=$recipes/finetune.py stage finetune torchllm train "$laptop/finetune.toml" --run.folder="$folder/finetune" \
    --checkpoint.initial="$folder/pretrain" "$tokenizer" --data.sources.0.path="$folder/corpus/train.jsonl"
OMP_NUM_THREADS=1 stage evaluate python "$laptop/docstrings.py" "$folder" "$folder/evaluate"
stage export torchllm export "$folder/finetune/config.toml" --export.folder="$folder/export"
talk "$folder/finetune/config.toml"
