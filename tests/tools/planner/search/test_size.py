"""Sizes by published laws."""

import tomllib

import pytest

from torchllm.config.schema import Config
from torchllm.facts.flops import parameter_count
from torchllm.tools.config.read import ConfigError, read_table
from torchllm.tools.planner.search.size import amount, main, sized_config


@pytest.mark.exhaustive
def test_the_model_has_the_asked_size() -> None:
    for parameters in [10e6, 125e6, 1e9, 7e9, 70e9]:
        config = sized_config(
            parameters, 20 * parameters, vocab=50304 if parameters > 50e6 else 4096, sequence_length=2048
        )
        assert parameter_count(config.model) == pytest.approx(parameters, rel=0.05), parameters
        assert 25 <= config.model.hidden / config.model.layers <= 160, parameters
        tokens = config.training.steps * config.training.global_batch_size * config.training.sequence_length
        assert tokens == pytest.approx(20 * parameters, rel=0.01), parameters


def test_rate_and_batch_are_those_of_the_step_law() -> None:
    """N = 10^9, D = 10^11, the last point of Li et al.: 1.79 x 3.83e-7 x 2.38e3 and 0.58 x 1.91e6 tokens."""
    config = sized_config(1.1e9, 1e11, vocab=50304, sequence_length=2048)
    blocks = parameter_count(config.model) - 2 * 50304 * config.model.hidden
    assert config.optimizer.learning_rate == pytest.approx(1.63e-3 * (blocks / 1e9) ** -0.713, rel=0.01)
    assert config.training.global_batch_size * 2048 == pytest.approx(1.108e6, rel=0.1)
    assert config.schedule.final_fraction * config.optimizer.learning_rate == pytest.approx(1e-5, rel=0.01)


def test_the_toml_names_hours_and_what_is_outside_of_a_law(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--params", "7B", "--cluster", "dgx_h100", "--gpus", "64"])
    text = capsys.readouterr().out
    assert "hours on 64 GPUs of dgx_h100" in text
    assert "measured from 60M to 1B parameters, not at 7.0" in text
    faults: list[ConfigError] = []
    config = read_table(Config, tomllib.loads(text), faults)
    assert not faults
    assert config.parallel.dp_shard * config.parallel.dp_replicate * config.parallel.tp * config.parallel.pp == 64


def test_hours_are_spent(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--hours", "10", "--cluster", "dgx_h100", "--gpus", "8"])
    line = next(line for line in capsys.readouterr().out.splitlines() if "hours on" in line)
    assert float(line.split("measured: ")[1].split()[0]) == pytest.approx(10, rel=0.1)


def test_wrong_options_are_refused() -> None:
    for words in [
        *(["--hours", "1"], ["--params", "0B"], ["--params", "1M"], []),
        *(["--params", "1B", "--gpus", "8"], ["--params", "1B", "--cluster", "dgx_h100", "--gpus", "0"]),
        *(["--params", "1B", "--sequence-length", "0"], ["--hours", "-1", "--cluster", "dgx_h100", "--gpus", "8"]),
    ]:
        with pytest.raises(SystemExit) as end:
            main(words)
        assert end.value.code == 2, words
    assert [amount(text) for text in ("350M", "1.5b", "2T", "1e9")] == [350e6, 1.5e9, 2e12, 1e9]
