"""Writes a checkpoint as a model for transformers, and for programs that read its models.

    python recipes/export.py RUN_FOLDER/config.toml --export.folder=FOLDER [--export.dtype=bfloat16]
        [--export.average=3] [--export.ema=true] [--checkpoint.resume=STEP_FOLDER] [--export.adapter=true]

The newest checkpoint of the run folder that is not suspect is used, unless another is named. The folder then holds
safetensors files, config.json, generation_config.json, tokenizer files and a model card. It appears when all files are
complete; an existing folder is never written to. One tensor at a time is in memory.

A run of low-rank updates is exported with them merged in; with export.adapter, only the updates, for peft.
"""

import sys

from torchllm.recipe import Config, load_run
from torchllm.tools.front.preflight import inspect_export

if __name__ == "__main__":
    CONFIG = load_run(sys.argv[1:], one_device=True, inspect=inspect_export)

from torchllm.recipe import export_adapter, export_model, report_errors


def main(config: Config) -> None:
    """Write the model, and print its folder."""
    report_errors()
    export = export_adapter if config.export.adapter else export_model
    exported = export(config, config.export.folder, ema=config.export.ema)
    steps = exported.facts.steps_in_words
    kind = f"adapter of {exported.architecture}" if config.export.adapter else exported.architecture
    print(f"step {steps}: {kind}, weights in {config.export.dtype}, in {exported.folder}")
    if exported.facts.missing_tokenizer:
        print(f"without tokenizer files: {exported.facts.missing_tokenizer}")


if __name__ == "__main__":
    main(CONFIG)
