"""Choose sizes, steps, batch and learning rate of a dense model from published laws, and predict its hours: no torch.

- tokens: 20 per parameter (Hoffmann et al. 2022, arXiv 2203.15556, table 3; 70 M to 16 B parameters);
- shape: width over blocks 64 to 128, where the loss is flat (Kaplan et al. 2020, arXiv 2001.08361, figure 5; to 1.5 B);
- learning rate 1.79 N^-0.713 D^0.307 and batch 0.58 D^0.571 tokens (Li et al. 2025, arXiv 2503.04715, "Step Law"; 60 M
  to 1 B parameters, 2 to 100 B tokens).

N are the parameters without embedding and head, D the tokens.
"""

import argparse
import math
from dataclasses import replace
from typing import NamedTuple

from torchllm.config import Config
from torchllm.config.errors import UserError
from torchllm.config.toml import toml_value
from torchllm.facts.flops import parameter_count
from torchllm.tools.planner.cluster import read_cluster
from torchllm.tools.planner.search.auto import choose_layouts, planned

TOKENS_PER_PARAMETER = 20
TIED_BELOW = 1e9
"""With fewer parameters embedding and head are one matrix, as in Llama 3.2 (1 B: tied) and Llama 3.1 (8 B: not)."""
WARMUP_STEPS = 2000
LAST_RATE = 1e-5
"""Warmup and last learning rate of the runs behind the Step Law."""


class Range(NamedTuple):
    """Where a law was measured."""

    law: str
    least: float
    most: float
    unit: str

    def remark(self, value: float) -> str:
        """Return a line if a value is outside; "" if it is inside."""
        if self.least <= value <= self.most:
            return ""
        return (
            f"{self.law}: measured from {_short(self.least)} to {_short(self.most)} {self.unit}, not at {_short(value)}"
        )


RANGES = {
    "parameters": (
        Range("20 tokens per parameter (Hoffmann et al. 2022)", 70e6, 16e9, "parameters"),
        Range("learning rate and batch (Li et al. 2025)", 60e6, 1e9, "parameters"),
    ),
    "tokens": (Range("learning rate and batch (Li et al. 2025)", 2e9, 100e9, "tokens"),),
}


def main(arguments: list[str]) -> None:
    """Print the TOML for the options of `torchllm size`. SystemExit(2) if they are wrong."""
    options = size_parser().parse_args(arguments)
    if options.hours and not (options.cluster and options.gpus):
        size_parser().error("--hours needs --cluster and --gpus")
    if options.gpus and not options.cluster:
        size_parser().error("--gpus needs --cluster")
    try:
        if options.hours:
            options.params = affordable_parameters(options)
        print(size_toml(options), end="")
    except UserError as error:
        size_parser().error(str(error))


def size_parser() -> argparse.ArgumentParser:
    """Return the options."""
    parser = argparse.ArgumentParser(
        prog="torchllm size", description="Write [model], [training], [optimizer] and [schedule] by published laws."
    )
    size = parser.add_mutually_exclusive_group(required=True)
    size.add_argument("--params", type=amount, metavar="N", help="parameters, such as 1B or 350M")
    size.add_argument(
        "--hours", type=amount, metavar="H", help="hours on the GPUs of --cluster: the size that they train"
    )
    parser.add_argument("--tokens", type=amount, metavar="D", help="tokens, such as 20B; default: 20 per parameter")
    parser.add_argument("--cluster", metavar="NAME", help="a file of train_configs/clusters; predicts the hours")
    parser.add_argument(
        "--gpus", type=whole_number, metavar="N", help="number of GPUs; default: one node of the cluster"
    )
    parser.add_argument(
        "--vocab", type=whole_number, default=50304, metavar="V", help="rows of the embedding (default: 50304)"
    )
    parser.add_argument(
        "--sequence-length", type=whole_number, default=2048, metavar="S", help="tokens (default: 2048)"
    )
    return parser


def amount(text: str) -> float:
    """Return a number that may end with K, M, B or T."""
    factors = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
    suffix = text[-1:].upper()
    try:
        value = float(text[:-1]) * factors[suffix] if suffix in factors else float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"not a number such as 350M or 1.5B: {text}")
    return value


def whole_number(text: str) -> int:
    """Return a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"not a whole number of at least 1: {text}")
    return int(text)


def sized_config(parameters: float, tokens: float, vocab: int, sequence_length: int) -> Config:
    """Return the config of a dense model with about `parameters`, trained on `tokens`.

    The width is a multiple of 64 (16 below 10 M parameters, 128 from 300 M on), the feed-forward layer 8/3 of it.
    UserError if embedding and head alone are larger.
    """
    base = Config()
    tied = parameters < TIED_BELOW
    ratio = min(
        128.0, max(64.0, 64.0 * (parameters / 100e6) ** (math.log(2) / math.log(70)))
    )  # 64 at 100 M, 128 at 7 B
    head = 128 if parameters >= 300e6 else 64 if parameters >= 10e6 else 16
    candidates = []
    for heads in range(2, 129):
        hidden = heads * head
        sizes = replace(base.model, hidden=hidden, heads=heads, vocab=vocab, tied_embeddings=tied, layers=1)
        sizes = replace(sizes, ffn=128 * round(hidden * 8 / 3 / 128), max_sequence_length=sequence_length)
        one, two = (parameter_count(replace(sizes, layers=layers)) for layers in (1, 2))
        layers = round((parameters - one) / (two - one)) + 1
        if layers >= 2:
            model = replace(sizes, layers=layers)
            miss = abs(parameter_count(model) / parameters - 1)
            candidates.append((abs(math.log(hidden / layers / ratio)) + 4 * miss, model))
    if not candidates:
        raise UserError(
            f"--vocab={vocab}: embedding and head leave nothing of {_short(parameters)} parameters for blocks"
        )
    model = min(candidates, key=lambda candidate: candidate[0])[1]
    blocks = parameter_count(model) - vocab * model.hidden * (1 if tied else 2)
    rate = 1.79 * blocks**-0.713 * tokens**0.307
    sequences = max(1, round(0.58 * tokens**0.571 / sequence_length))
    unit = max(1, 2 ** (sequences.bit_length() - 3))  # at least four units: a batch that many numbers of ranks divide
    config = replace(
        base,
        model=model,
        training=replace(base.training, sequence_length=sequence_length),
        optimizer=replace(base.optimizer, learning_rate=float(f"{rate:.3g}")),
        schedule=replace(base.schedule, final_fraction=min(1.0, float(f"{LAST_RATE / rate:.3g}"))),
    )
    return with_batch(config, unit * round(sequences / unit), tokens)


def with_batch(config: Config, batch: int, tokens: float) -> Config:
    """Return the config with `batch` sequences a step, and as many steps as `tokens` take."""
    steps = max(1, round(tokens / (batch * config.training.sequence_length)))
    training = replace(config.training, steps=steps, global_batch_size=batch)
    return replace(
        config, training=training, schedule=replace(config.schedule, warmup_steps=min(WARMUP_STEPS, steps // 10))
    )


def with_layout(config: Config, cluster: str, gpus: int) -> tuple[Config, float, str]:
    """Return the config with the planner's layout, the hours that it predicts, and its line."""
    named = replace(config, cluster=replace(config.cluster, name=cluster))
    configs, line = choose_layouts(named, gpus, written=())
    prediction = planned(configs[0])
    assert prediction is not None  # the cluster is known
    return configs[0], prediction.step * config.training.steps / 3600, line


def affordable_parameters(options: argparse.Namespace) -> float:
    """Return the parameters that --hours train on --tokens, or on 20 tokens for each of them."""
    # Hours grow with the parameters times the tokens: with the square of the parameters where the tokens grow too.
    parameters, power = 1e9, 1.0 if options.tokens else 0.5
    for _ in range(6):
        tokens = options.tokens or TOKENS_PER_PARAMETER * parameters
        config = sized_config(parameters, tokens, options.vocab, options.sequence_length)
        hours = with_layout(config, options.cluster, options.gpus)[1]
        if abs(hours / options.hours - 1) < 0.03:
            break
        parameters *= (options.hours / hours) ** power
    return parameters


def size_toml(options: argparse.Namespace) -> str:
    """Return the TOML with a comment per law, and the predicted hours where a cluster is named."""
    tokens = options.tokens or TOKENS_PER_PARAMETER * options.params
    config = sized_config(options.params, tokens, options.vocab, options.sequence_length)
    count = parameter_count(config.model)
    share = tokens / count
    lines = [
        f"# {_short(count)} parameters, {_short(tokens)} tokens: {share:.3g} per parameter (compute-optimal: 20).",
        "# Hoffmann et al. 2022; learning rate and batch: Li et al. 2025. docs/size.md says more.",
    ]
    values = {"parameters": count, "tokens": tokens}
    remarks = [law.remark(values[name]) for name, laws in RANGES.items() for law in laws]
    lines += [f"# Outside of its range: {remark}" for remark in remarks if remark]
    if options.cluster:
        gpus = options.gpus or _gpus_per_node(options.cluster)
        config, hours, line = with_layout(config, options.cluster, gpus)
        lines += [f"# Planned, not measured: {hours:.3g} hours on {gpus} GPUs of {options.cluster}.", f"# {line}"]
    default = Config()
    for section in ("cluster", "model", "training", "optimizer", "schedule", "parallel", "recompute", "compile"):
        ours, theirs = vars(getattr(config, section)), vars(getattr(default, section))
        changed = {key: value for key, value in ours.items() if value != theirs[key]}
        if changed:
            lines += ["", f"[{section}]", *(f"{key} = {toml_value(value)}" for key, value in changed.items())]
    return "\n".join(lines) + "\n"


def _gpus_per_node(cluster: str) -> int:
    problems: list[str] = []
    hardware = read_cluster(cluster, problems)
    if hardware is None:
        raise UserError("; ".join(problems))
    return hardware.gpus_per_node


def _short(value: float) -> str:
    for factor, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if value >= factor:
            return f"{value / factor:.3g}{letter}"
    return f"{value:.3g}"
