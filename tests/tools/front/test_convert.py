"""Configs of other programs become ours, and every key of theirs is accounted for."""

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from torchllm.config.errors import UserError
from torchllm.config.schema import Config
from torchllm.tools.config.foreign import foreign_hint, foreign_keys
from torchllm.tools.config.load import load_config
from torchllm.tools.config.read import ConfigError, read_table
from torchllm.tools.front.convert import COMPUTED, DEFAULTS, converted_config

TORCHTITAN = """
[job]
description = "Llama 3 8B training"
[profiling]
profile_freq = 100
[metrics]
log_freq = 5
[model]
name = "llama3"
flavor = "8B"
hf_assets_path = "./assets/hf/Llama-3.1-8B"
[optimizer]
name = "AdamW"
lr = 3e-4
[lr_scheduler]
warmup_steps = 200
decay_ratio = 0.2
decay_type = "sqrt"
[training]
local_batch_size = 2
seq_len = 8192
steps = 1000
dataset = "c4"
[parallelism]
tensor_parallel_degree = 2
pipeline_parallel_degree = 2
[checkpoint]
enable = false
interval = 500
[activation_checkpoint]
mode = "selective"
selective_ac_option = "2"
[compile]
enable = true
[experimental]
custom_import = "mine"
"""
MEGATRON = """
torchrun --nproc_per_node 8 pretrain_gpt.py ${ARGS[@]}
ARGS=(
    --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --group-query-attention --num-query-groups 8
    --position-embedding-type rope --normalization RMSNorm --swiglu --vocab-size 50257
    --micro-batch-size 1 --global-batch-size 128 --train-iters 10000 --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine
    --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 4 \\
    --data-path 0.3 data/a 0.7 data/b --bf16 --save $CHECKPOINTS --seq-length 4096
    --distributed-timeout-minutes 30
)
"""


def _write(folder: Path, name: str, text: str) -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def _values(text: str) -> dict[str, object]:
    """Return the settings of our TOML, which our reader must take, by dotted keys; without those that are to be SET."""
    table = tomllib.loads("".join(line for line in text.splitlines(keepends=True) if '"SET"' not in line))
    faults: list[ConfigError] = []
    base = table.pop("base", "")
    read_table(Config, table, faults)
    assert not faults
    return {"base": base} | {f"{section}.{key}": value for section in table for key, value in table[section].items()}


def test_torchtitan_toml(tmp_path: Path) -> None:
    text = converted_config(_write(tmp_path, "llama3_8b.toml", "comm = 2\n" + TORCHTITAN), gpus=16)
    assert "#   comm = 2: " in text  # a value in the place of a section
    values = _values(text)
    assert values["base"] == "models/llama3_8b.toml"
    assert values["data.tokenizer"] == "./assets/hf/Llama-3.1-8B/tokenizer.json"
    assert values["data.sources"] == [{"kind": "hub", "path": "allenai/c4", "subset": "en"}]
    assert values["training.micro_batch_size"] == 1  # of the pipeline, which divides the local batch
    assert values["training.global_batch_size"] == 2 * 16 // (2 * 2)
    assert (values["schedule.name"], values["schedule.decay"], values["schedule.decay_steps"]) == ("wsd", "1-sqrt", 200)
    assert values["schedule.final_fraction"] == 0.0  # the default there; ours is 0.1
    assert values["parallel.zero_stage"] == 2  # "default" does not reshard under pp
    assert values["parallel.sequence_parallel"] is True
    assert (values["recompute.mode"], values["recompute.k"]) == ("every_k", 2)
    assert values["checkpoint.interval"] == 0
    assert values["compile.block"] is True
    assert 'experimental.custom_import = "mine": no key here is known for it' in text


def test_the_result_is_a_config_that_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = _write(tmp_path, "ours.toml", converted_config(_write(tmp_path, "theirs.toml", TORCHTITAN), gpus=16))
    monkeypatch.setenv("WORLD_SIZE", "16")
    monkeypatch.setenv("RANK", "0")
    config = load_config([ours, f"--run.folder={tmp_path / 'run'}"])
    assert config.training.sequence_length == 8192
    assert config.model.layers == 32


FLAVORS = {
    "llama3": ("debugmodel", "1B", "3B", "8B", "8B_flex", "debugmodel_varlen_attn", "70B", "405B"),
    "qwen3": ("debugmodel", "0.6B", "1.7B", "4B", "8B", "14B", "32B", "30B-A3B", "235B-A22B"),
}
LACKING = {"llama4": "17bx16e", "mine": "1B", "long": 300 * "x"}


def _titan(folder: Path, name: str, flavor: str, **sections: dict[str, object]) -> str:
    """Return the conversion for 8 GPUs of a config of torchtitan with keys that each has, and those of `sections`."""
    theirs: dict[str, dict[str, object]] = {
        "model": {"name": name, "flavor": flavor},
        "training": {"local_batch_size": 1, "seq_len": 4096, "steps": 1000},
    }
    for section, values in sections.items():
        theirs[section] = theirs.get(section, {}) | values
    return converted_config(_write(folder, "theirs.json", json.dumps(theirs)), gpus=8)


def _filled_in(text: str) -> str:
    """Return a conversion with a tokenizer and a source, which only its user knows."""
    return text.replace('tokenizer = "SET"', 'tokenizer = "bytes"').replace('path = "SET"', 'path = "corpus"')


def test_flavors_of_torchtitan_pass_our_check_or_say_what_is_missing_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("RANK", "0")
    for name, flavors in FLAVORS.items():
        for flavor in flavors:
            text = _titan(tmp_path, name, flavor)
            config = load_config([_write(tmp_path, "ours.toml", _filled_in(text)), "--run.folder=run"])
            assert config.model.layers != Config().model.layers, flavor
            assert config.data.document_mask == ("_" in flavor), flavor  # flex and varlen
    for name, flavor in LACKING.items():
        text = _titan(tmp_path, name, flavor)
        first, _, unset, *lines = text.splitlines()
        assert re.search("our models lack|train_configs/models has no mine 1B|is not understood: set base", first)
        assert unset.startswith("# Still to be SET: data.tokenizer, data.sources, base")
        assert lines[0].startswith('base = "SET"')
        with pytest.raises(SystemExit):
            load_config([_write(tmp_path, "ours.toml", _filled_in(text)), "--run.folder=run"])
        (error,) = capsys.readouterr().err.splitlines()
        assert error.endswith('ours.toml:4: base: is still "SET", a value to fill in: it must be the name of a file')


def test_what_our_check_refuses_is_set_or_said_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = {"training": {"seq_len": 4096.5, "steps": [1]}, "lr_scheduler": {"decay_type": "cubic"}}
    text = _titan(tmp_path, "llama3", "8B", parallelism={"tensor_parallel_degree": 3}, **wrong)
    wrong_keys = "training.sequence_length, training.steps, schedule.name, data.tokenizer, data.sources"
    header, unset, *refused = text.split("base = ")[0].splitlines()
    assert header.endswith("Check it: NPROC=8 ./run_train.sh THIS_FILE --check")
    assert unset == f"# Still to be SET: {wrong_keys}"
    assert "# --check refuses parallel.tp: 3 does not divide model.heads = 32" in refused
    assert not any("training.sequence_length" in line for line in refused)  # it is not known yet
    assert "must be a whole number of at least 1, not 4096.5" in text
    for key, value in {"sequence_length": "3072", "steps": "1000", "name": '"cosine"'}.items():
        text = text.replace(f'{key} = "SET"', f"{key} = {value}")
    ours = _write(tmp_path, "ours.toml", _filled_in(text))
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(SystemExit):
        load_config([ours, "--run.folder=run"])
    errors = [error.partition(": ")[2] for error in capsys.readouterr().err.splitlines()]
    assert errors == [line.removeprefix("# --check refuses ") for line in refused]


def test_a_key_that_another_one_rules_out_is_no_setting(tmp_path: Path) -> None:
    text = converted_config(_write(tmp_path, "args.json", '{"optim": "sgd", "adam_beta2": 0.999, "max_steps": 9}'))
    assert "optimizer.beta2" not in _values(text)
    assert '#   adam_beta2 = 0.999: optimizer.beta2 needs optimizer.name = "adamw"' in text


def test_saves_that_are_off_by_their_default_say_so(tmp_path: Path) -> None:
    text = _titan(tmp_path, "llama3", "8B", checkpoint={"interval": 500})
    assert "interval = 0  # checkpoint.enable = false, the default there" in text
    assert "checkpoint.interval = 500: it is off, as checkpoint.enable is not true" in text
    assert "interval = 0  # checkpoint.enable = false, the default there" in _titan(tmp_path, "llama3", "8B")
    for key in ("enable", "enable_checkpoint"):  # in older versions
        text = _titan(tmp_path, "llama3", "8B", checkpoint={"interval": 700, key: True})
        assert _values(text)["checkpoint.interval"] == 700, key


FLOAT8 = {"converters": ["float8"]}


def test_options_of_float8_are_read_under_both_names_and_change_nothing_where_it_is_off(tmp_path: Path) -> None:
    options = {"recipe_name": "rowwise", "filter_fqns": ["wq"], "emulate": True}
    for name in ("float8", "quantize.linear.float8", "quantize.grouped_mm.float8"):
        sections = {"float8": options} if name == "float8" else {"quantize": {"linear": {"float8": options}}}
        text = _titan(tmp_path, "llama3", "8B", model={"converters": [name]}, **sections)
        is_on = "grouped_mm" not in name
        assert _values(text).get("float8.recipe") == ("rowwise" if is_on else None), name
        for option in ("filter_fqns", "emulate"):
            assert (text.index(f"float8.{option}") < text.index("# Does not change the training")) == is_on, name
        assert "no key here is known" not in text, name


def test_defaults_of_torchtitan_that_differ_are_written_out(tmp_path: Path) -> None:
    values = _values(_titan(tmp_path, "llama3", "8B"))
    assert (values["compile.block"], values["compile.loss"], values["optimizer.vector_decay"]) == (False, False, 1.0)
    assert (values["recompute.mode"], values["recompute.k"]) == ("every_k", 2)
    values = _values(_titan(tmp_path, "llama3", "8B", compile={"enable": True}, optimizer={"param_groups": [1]}))
    assert (values["compile.block"], values["compile.loss"]) == (True, True)
    assert "optimizer.vector_decay" not in values  # each group has its own decay
    values = _values(_titan(tmp_path, "llama3", "8B", compile={"enable": True, "components": ["loss"]}))
    assert (values["compile.block"], values["compile.loss"]) == (False, True)


def test_a_wrong_value_that_no_training_reads_is_a_comment(tmp_path: Path) -> None:
    text = _titan(tmp_path, "llama3", "8B", checkpoint={"export_dtype": "float16"})
    assert "# Still to be SET: data.tokenizer, data.sources\n" in text
    assert '#   checkpoint.export_dtype = "float16": export.dtype must be one of' in text


def test_remarks_that_change_the_training_come_first(tmp_path: Path) -> None:
    keys = {"description": "half of a character: \ud800", "custom\nimport": 1}
    text = _titan(tmp_path, "deepseek_v3", "16B", job=keys, float8={"filter_fqns": ["wq"]}, model=FLOAT8)
    places = [text.index(word) for word in ("no deepseek_v3 16B", "custom?import", "float8.filter_fqns", "job.desc")]
    assert places == sorted(places)
    assert text.index("# Does not change the training") < places[-1]
    tomllib.loads(text.encode().decode())  # a line break in a key is none in a comment


def test_torchtitan_python_config_is_parsed_and_not_run(tmp_path: Path) -> None:
    file = _write(
        tmp_path,
        "registry.py",
        """
raise SystemExit("was imported")
def llama3_8b():
    return Trainer.Config(
        model_spec=model_registry("8B"),
        optimizer=OptimizersContainer.Config(lr=3e-4),
        training=TrainingConfig(local_batch_size=1, global_batch_size=64, seq_len=8192, steps=1000),
        validator=Validator.Config(enable=True, freq=500),
        activation_checkpoint=None,
    )
def llama3_70b():
    spec = model_registry("70B", converters=[Float8LinearConverter.Config()])
    return Trainer.Config(
        model_spec=spec,
        training=TrainingConfig(num_tokens_per_microbatch_per_dp_rank=1 * 2048, max_context_length=2048, steps=9),
        dataloader=GrainDataLoader.Config(dataset=PackingConfig(dataset=DATASETS["c4"])),
        activation_checkpoint=FullAC.Config(),
    )
def llama3_70b_long():
    config = llama3_70b()
    config.training.max_context_length = 4096
    config.training.num_tokens_per_microbatch_per_dp_rank = 2 * 4096
    config.parallelism = ParallelismConfig(pipeline_parallel_degree=4, num_pp_microbatches=3)
    return config
""",
    )
    values = _values(converted_config(f"{file}:llama3_8b"))
    assert values["base"] == "models/llama3_8b.toml"
    assert (values["training.global_batch_size"], values["evaluate.interval"]) == (64, 500)
    assert values["recompute.mode"] == "none"
    values = _values(converted_config(f"{file}:llama3_70b_long", gpus=32))
    assert values["base"] == "models/llama3_70b.toml"
    assert (values["training.sequence_length"], values["training.micro_batch_size"]) == (4096, 2)
    assert values["training.global_batch_size"] == 2 * 3 * 32 // 4  # three micro batches in a pipeline of 4
    assert (values["recompute.mode"], values["float8.recipe"]) == ("full", "rowwise")  # the default of that class
    assert values["data.sources"] == [{"kind": "hub", "path": "allenai/c4", "subset": "en"}]
    with pytest.raises(UserError, match="there are: llama3_8b, llama3_70b, llama3_70b_long"):
        converted_config(file)


def test_constants_of_a_python_config_are_filled_in(tmp_path: Path) -> None:
    file = _write(
        tmp_path,
        "registry.py",
        """
from elsewhere import FOLDER
SEQ = 4096
STEPS: int = (SEQ + 904) // 5 - 1
FLAVOR = "70B"
TWICE = 1
TWICE = 2
def llama3_mine():
    return Trainer.Config(
        model_spec=model_registry(FLAVOR), hf_assets_path=FOLDER, dump_folder=FOLDER,
        training=TrainingConfig(local_batch_size=TWICE, seq_len=SEQ, steps=STEPS),
    )
""",
    )
    text = converted_config(file, gpus=8)
    values = _values("".join(line for line in text.splitlines(keepends=True) if '"$' not in line.partition("#")[0]))
    assert values["base"] == "models/llama3_70b.toml"
    assert (values["training.sequence_length"], values["training.steps"]) == (4096, 999)
    assert "run.folder" not in values
    assert text.splitlines()[1].startswith("# Still to be SET: training.micro_batch_size, training.global")
    assert 'dump_folder = "$FOLDER": a variable: write its value into run.folder' in text


def test_training_arguments_of_transformers(tmp_path: Path) -> None:
    theirs = {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 8,
        "learning_rate": 5e-5,
        "lr_scheduler_type": "linear",
        "max_steps": 2000,
        "warmup_ratio": 0.05,
        "warmup_steps": 0,
        "adam_beta2": 0.999,
        "optim": "adamw_torch_fused",
        "gradient_checkpointing": True,
        "bf16": True,
        "fp16": False,
        "push_to_hub": False,
        "hub_token": None,
    }
    file = _write(tmp_path, "args.json", json.dumps(theirs))
    values = _values(converted_config(file, gpus=8))
    assert values["training.global_batch_size"] == 4 * 8 * 8
    assert values["schedule.warmup_steps"] == 100
    assert values["schedule.final_fraction"] == 0.0
    assert values["optimizer.beta2"] == 0.999
    assert values["recompute.mode"] == "full"
    unknown_gpus = converted_config(file)
    assert "global_batch_size is 32 times the number of data-parallel ranks: give --gpus=N" in unknown_gpus
    assert 'global_batch_size = "SET"' in unknown_gpus


def test_arguments_of_transformers_that_change_nothing_are_not_said_to(tmp_path: Path) -> None:
    theirs = {"max_steps": 9, "learning_rate": 1e-3, "warmup_ratio": 0.0, "warmup_steps": 3, "num_train_epochs": 3.0}
    theirs |= {"report_to": ["wandb"], "ddp_timeout": 60, "use_cpu": True, "lr_scheduler_type": "cosine_with_min_lr"}
    theirs |= {"logging_strategy": "steps", "save_strategy": "steps", "do_train": True, "run_name": "mine"}
    for least in ({"min_lr_rate": 0.2}, {"min_lr": 2e-4}):
        text = converted_config(_write(tmp_path, "args.json", json.dumps(theirs | {"lr_scheduler_kwargs": least})))
        values = _values(text)
        assert (values["schedule.name"], values["schedule.final_fraction"]) == ("cosine", 0.2), least
    assert "warmup_steps = 3  # warmup_steps = 3\n" in text
    assert (values["metrics.wandb"], values["run.timeout"], values["run.device"]) == ("huggingface", 60, "cpu")
    remarks = text.partition("# May change the training")[2].partition("# Does not change the training")[0]
    assert not remarks


def test_a_setting_of_several_keys(tmp_path: Path) -> None:
    for number, (theirs, ours, value) in enumerate(
        [
            ({"warmup_steps": 0.05, "max_steps": 2000}, "schedule.warmup_steps", 100),  # a share since transformers 5
            ({"max_length": 64, "max_seq_length": 128}, "training.sequence_length", 64),
            (
                {"training": {"batch_size": 4, "tensor_parallel_degree": 2}},
                "training.global_batch_size",
                16,
            ),  # old names
            ({"optim": "adamw_bnb_8bit", "max_steps": 1}, "optimizer.name", None),  # its states are of 8 bits
            ({"validation": {"freq": 5}, "training": {"seq_len": 8}}, "evaluate.interval", None),  # off unless enabled
            ({"validation": {"enable": True, "freq": 5}, "training": {"seq_len": 8}}, "evaluate.interval", 5),
            ({"float8": {"recipe_name": "rowwise"}, "training": {"steps": 1}}, "float8.recipe", None),  # no converter
        ]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        text = converted_config(_write(folder, "theirs.json", json.dumps(theirs)), gpus=8)
        assert _values(text).get(ours) == value, theirs
        if "max_length" in theirs:
            assert "max_seq_length = 128: training.sequence_length is 64 by max_length = 64" in text, theirs


def test_megatron_arguments(tmp_path: Path) -> None:
    text = converted_config(_write(tmp_path, "train.sh", MEGATRON))
    values = _values(text)
    assert values["model.family"] == "llama"
    assert values["model.vocab"] == 50432  # 50,257 rounded up to a multiple of 128 x tp
    assert values["parallel.virtual_stages"] == 32 // 2 // 4
    assert values["schedule.final_fraction"] == pytest.approx(0.1)
    assert values["optimizer.beta2"] == 0.999  # the default there; ours is 0.95
    assert values["data.sources"] == [
        {"kind": "megatron", "path": "data/a", "weight": 0.3},
        {"kind": "megatron", "path": "data/b", "weight": 0.7},
    ]
    assert values["model.ffn"] == 10880  # 2/3 of 4 x 4,096, rounded down to a multiple of 64: their default with SwiGLU
    assert values["model.tied_embeddings"] is True
    assert values["run.timeout"] == 1800  # seconds
    assert "run.folder" not in values
    assert "a variable: write its value into run.folder" in text


def test_megatron_without_a_family_is_its_default(tmp_path: Path) -> None:
    values = _values(converted_config(_write(tmp_path, "train.sh", "--num-layers 2 --hidden-size 64 --train-iters 9")))
    assert (values["model.family"], values["model.ffn"]) == ("gpt", 256)


def test_what_megatron_does_by_default_and_our_models_do_not_is_said(tmp_path: Path) -> None:
    def converted(words: str) -> str:
        base = "--num-layers 2 --hidden-size 64 --train-iters 90 --lr 1e-3 "
        return converted_config(_write(tmp_path, "train.sh", base + words))

    llama = "--swiglu --normalization RMSNorm --position-embedding-type rope"
    no_biases, biases = "matrices have no biases there, and model.family", "matrices have biases there, and our models"
    for words, remark in (
        ("", ""),
        ("--disable-bias-linear", no_biases),
        (f"{llama} --disable-bias-linear", ""),
        (llama, biases),
    ):
        text = converted(words)
        first, *_ = text.splitlines()
        assert remark in first if remark else "the architecture differs" not in text
        assert ("the model.family has them" in text) == (words == f"{llama} --disable-bias-linear")
    assert "#   hidden_dropout = 0.1, the default there: there is no dropout here" in converted("")
    assert "dropout = 0.1" not in converted("--attention-dropout 0 --hidden-dropout 0")
    wsd = "--lr-decay-style WSD --lr-wsd-decay-iters 30"
    changes, *_ = converted(wsd).partition("# Does not change")
    assert (
        '#   lr_wsd_decay_style = "exponential", the default there: schedule.decay is linear or 1-sqrt here' in changes
    )
    assert _values(converted(f"{wsd} --lr-wsd-decay-style minus_sqrt"))["schedule.decay"] == "1-sqrt"
    assert "lr_wsd_decay_style" not in converted("")


SCRIPT = """
export WIDTH=512
HIDDEN=${HIDDEN:-$WIDTH}   # a default
TP=1
TP=2
ARGS=(
    --num-layers ${LAYERS:-3} --hidden-size $HIDDEN --seq-length 128  # its comment
    "--train-samples 640" --global-batch-size 64 --micro-batch-size $BATCH
)
if [ $X ]; then ARGS+=(--tensor-model-parallel-size "${TP}"); fi
RATES="
    --min-lr 1e-4 \\
    --clip-grad 0.5
"
torchrun pretrain_gpt.py "${ARGS[@]}" $RATES \\
    --swiglu --softmax-type learnable --lr 1e-3 2>&1 | tee log
echo done
"""


def test_variables_of_a_script_and_values_that_end_with_its_lines(tmp_path: Path) -> None:
    text = converted_config(_write(tmp_path, "train.sh", SCRIPT))
    table = tomllib.loads(text)
    assert (table["model"]["layers"], table["model"]["hidden"], table["training"]["steps"]) == (3, 512, 10)
    assert (table["optimizer"]["learning_rate"], table["training"]["max_grad_norm"]) == (1e-3, 0.5)
    assert (table["training"]["micro_batch_size"], table["parallel"]["tp"]) == ("$BATCH", "${TP}")  # refused by --check
    assert table["model"]["family"] == "SET"  # SwiGLU without RMSNorm and rotary positions
    assert 'softmax_type = "learnable": the architecture differs (attention sinks)' in text


def test_defaults_of_ours_decide_neither_model_nor_batch_nor_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = _write(tmp_path, "args.json", json.dumps({"per_device_train_batch_size": 4, "num_train_epochs": 3}))
    ours = _write(tmp_path, "ours.toml", converted_config(theirs))
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(SystemExit):
        load_config([ours])
    errors = capsys.readouterr().err
    for key in ('base: is still "SET"', "training.sequence_length", "training.global_batch_size", "training.steps"):
        assert key in errors
    data = tomllib.loads(Path(ours).read_text())["data"]
    assert (data["tokenizer"], data["sources"]) == ("SET", [{"kind": "text", "path": "SET"}])  # no such files
    text = converted_config(_write(tmp_path, "lit.json", '{"train": {"max_seq_length": {}, "max_steps": 3}}'))
    assert 'sequence_length = "SET"  # train.max_seq_length = {}' in text
    with pytest.raises(UserError, match="is a folder"):
        converted_config(str(tmp_path))


def test_of_the_commands_of_a_nanochat_script_base_train_is_read(tmp_path: Path) -> None:
    script = """
python -m scripts.tok_train --max-chars=2000000000
torchrun -m scripts.base_train -- --depth=12 --num-iterations=9 --device-batch-size=16
torchrun -m scripts.chat_sft -- --device-batch-size=4 --num-iterations=5
"""
    text = converted_config(_write(tmp_path, "speedrun.sh", script))
    values = _values(text)
    assert (values["training.steps"], values["training.micro_batch_size"]) == (9, 16)
    assert "max_chars" not in text


def test_nanochat_meta_file(tmp_path: Path) -> None:
    theirs = {
        "step": 100,
        "user_config": {"depth": 12, "total_batch_size": 524288, "num_iterations": 1000, "run": "dummy"}
        | {"fp8": False, "fp8_recipe": "tensorwise"},
    }
    text = converted_config(_write(tmp_path, "meta_000100.json", json.dumps(theirs)))
    values = _values(text)
    assert (values["model.layers"], values["model.hidden"], values["model.heads"]) == (12, 768, 6)
    assert values["training.global_batch_size"] == 256
    assert (values["optimizer.name"], values["optimizer.head_rate"]) == ("muon", pytest.approx(0.4))
    assert (values["schedule.name"], values["schedule.decay_steps"]) == ("wsd", 650)
    assert not values.keys() & {"metrics.wandb", "float8.recipe"}  # a run named dummy is not logged, fp8 is off
    assert "the architecture differs" in text


def test_a_decay_of_no_steps_is_a_constant_rate(tmp_path: Path) -> None:
    """`decay_steps = 0` stands for a tenth of the run."""
    theirs = {"user_config": {"depth": 12, "num_iterations": 1000, "warmdown_ratio": 0.0}}
    for text in (
        converted_config(_write(tmp_path, "meta_000100.json", json.dumps(theirs))),
        _titan(tmp_path, "llama3", "8B", lr_scheduler={"decay_ratio": 0.0, "min_lr_factor": 0.2}),
    ):
        values = _values(text)
        assert values["schedule.name"] == "constant"
        assert not values.keys() & {"schedule.decay_steps", "schedule.decay", "schedule.final_fraction"}


def test_litgpt_yaml(tmp_path: Path) -> None:
    theirs = """
model_name: tiny-llama-1.1b
train:
  global_batch_size: 512
  max_tokens: 3000000000
  max_seq_length: 2048
  min_lr: 4.0e-05
optimizer:
  class_path: torch.optim.AdamW
  init_args:
    lr: 4e-4
    betas: [0.9, 0.98]
    weight_decay: 0.1
logger_name: wandb
"""
    values = _values(converted_config(_write(tmp_path, "pretrain.yaml", theirs)))
    assert values["optimizer.learning_rate"] == 4e-4  # a string in YAML
    assert values["optimizer.vector_decay"] == 1.0  # it decays all parameters
    assert values["metrics.wandb"] == "litgpt"
    assert (values["optimizer.name"], values["optimizer.beta2"]) == ("adamw", 0.98)
    assert values["training.steps"] == 2862  # 3e9 / (512 x 2,048), rounded up
    assert values["schedule.final_fraction"] == pytest.approx(0.1)
    assert values["schedule.warmup_steps"] == 2000  # the default there


def test_litgpt_has_the_optimizer_of_torch_where_the_file_names_none(tmp_path: Path) -> None:
    def values_of(optimizer: str) -> dict[str, Any]:
        theirs = f"model_name: x\ntrain:\n  max_steps: 9\n  max_seq_length: 64\n{optimizer}"
        values = _values(converted_config(_write(tmp_path, "pretrain.yaml", theirs)))
        return {key.removeprefix("optimizer."): value for key, value in values.items() if key.startswith("optimizer.")}

    adamw = {"name": "adamw", "learning_rate": 1e-3, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.01}
    for optimizer in ("", "optimizer: AdamW\n"):
        assert values_of(optimizer) == adamw | {"vector_decay": 1.0}
    named = "optimizer:\n  class_path: torch.optim.AdamW\n  init_args:\n    weight_decay: 0.2\n"
    assert values_of(named) == adamw | {"vector_decay": 1.0, "weight_decay": 0.2}
    sgd = "optimizer:\n  class_path: torch.optim.SGD\n  init_args:\n    lr: 0.2\n"
    assert values_of(sgd) == {"name": "sgd", "learning_rate": 0.2}


def test_a_file_that_is_no_config_is_refused(tmp_path: Path) -> None:
    for number, (content, message) in enumerate(
        [
            (b"PK\x03\x04", "is a pickle"),
            (b"not = [toml", "cannot be read"),
            (b'model_type = "llama"\nhidden_size = 64\n', "is a model without a run: `torchllm model "),
            (b"[mine]\nkey = 1\n", "has no key of torchtitan, huggingface, megatron, nanochat, litgpt"),
        ]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "x.toml").write_bytes(content)
        with pytest.raises(UserError, match=message):
            converted_config(str(folder / "x.toml"))


def test_every_name_of_the_table_exists() -> None:
    config = Config()
    sections = set(vars(config))
    keys = {f"{section}.{key}" for section in sections for key in vars(getattr(config, section))}
    for program, table in foreign_keys().items():
        wrong = [equal.key for equal in table.values() if equal.key not in {"", "base", *sections, *keys}]
        assert wrong == []
        assert COMPUTED[program].keys() - table.keys() == set()
        assert DEFAULTS[program].keys() - table.keys() == set()


def test_an_unknown_key_of_another_program_is_translated() -> None:
    faults: list[ConfigError] = []
    read_table(Config, {**tomllib.loads(TORCHTITAN), "training": {"lr": 1e-3, "seq_len": 1}}, faults)
    messages = {fault.key: fault.message for fault in faults}
    assert messages["parallelism"].endswith("torchtitan's parallelism is parallel.tp, parallel.pp")
    assert messages["activation_checkpoint"].endswith("is recompute.mode, recompute.k")
    assert messages["training.seq_len"].endswith("is training.sequence_length")
    assert messages["training.lr"].endswith("Megatron-LM's lr is optimizer.learning_rate")
    assert messages["model.flavor"].endswith("is base")
    assert foreign_hint("optim", {}) == ""  # a key there, and no section
    faults.clear()
    read_table(Config, {"model": {"intermediate": 8, "intermediate_size": 8, "zzz": 1}}, faults)
    assert [fault.message.rpartition(" is ")[2] for fault in faults[:2]] == ["model.ffn", "model.ffn"]
    assert faults[2].message == "unknown key; --help lists all keys"
