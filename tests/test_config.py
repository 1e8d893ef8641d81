import dataclasses
import json

import pytest

from a2c_config import PRESETS, A2CConfig, ConfigError


def error_of(capsys, *argv):
    with pytest.raises(SystemExit) as stopped:
        A2CConfig.from_command_line(list(argv))
    assert stopped.value.code == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1 and message.startswith("error: ")
    return message


@pytest.mark.parametrize(
    "argv, expected",
    [
        (["--actr_num", "3"], "--actor_num"),
        (["--actor_num", "two"], "two"),
        (["--actor_num", "0"], "at least 1"),
        (["--env_num", "1.5"], "1.5"),
        (["--engine", "locl"], "did you mean 'local'"),
        (["--preset", "prl"], "did you mean 'parl'"),
        (["--gamma", "1.01"], "at most 1"),
        (["--gamma", "nan"], "finite"),
        (["--start_lr", "0"], "above 0"),
        (["--seed", "-1"], "at least 0"),
        (["--master_address", "localhost"], "HOST:PORT"),
        (["--device", "tpu"], "gpu:N"),
        (["--env_dim", "85"], "multiple of 4"),
        (["--max_sample_steps", "10"], "one update"),
        (["--config", "missing.json"], "No such file"),
    ],
)
def test_a_bad_option_is_one_sentence_with_the_value_and_the_way_out(capsys, argv, expected):
    assert expected in error_of(capsys, *argv)


def test_every_setting_is_an_option_with_help(capsys):
    with pytest.raises(SystemExit):
        A2CConfig.from_command_line(["--help"])
    text = capsys.readouterr().out
    for setting in dataclasses.fields(A2CConfig):
        assert f"--{setting.name}" in text
        assert setting.metadata["help"]


def test_options_beat_the_file_which_beats_the_preset_which_beats_the_defaults(tmp_path):
    path = tmp_path / "settings.json"
    path.write_text(json.dumps({"env_num": 6, "sample_batch_steps": 7}))
    config = A2CConfig.from_command_line(["--preset", "parl", "--config", str(path), "--env_num", "9"])
    assert (config.actor_num, config.sample_batch_steps, config.env_num) == (5, 7, 9)
    assert config.gamma == A2CConfig().gamma


@pytest.mark.parametrize("text", ["[1]", "{", '{"actor_nmu": 3}', '{"actor_num": "3"}', '{"episodic_life": 1}'])
def test_a_bad_settings_file_names_what_is_wrong(tmp_path, capsys, text):
    path = tmp_path / "settings.json"
    path.write_text(text)
    error_of(capsys, "--config", str(path))


def test_settings_survive_json():
    config = A2CConfig(env_num=3, master_address="10.0.0.1:8010", episodic_life=True)
    assert A2CConfig.from_dict(json.loads(json.dumps(config.as_dict()))) == config


def test_numbers_may_be_written_as_1e6():
    assert A2CConfig.from_command_line(["--max_sample_steps", "1e6"]).max_sample_steps == 1_000_000


def test_booleans_can_be_switched_off():
    assert not A2CConfig.from_command_line(["--no-normalize_advantages"]).normalize_advantages


def test_a_config_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        A2CConfig().seed = 3


def test_parl_preset_is_the_classic_run():
    config = A2CConfig(**PRESETS["parl"].settings)
    assert (config.actor_num, config.env_num, config.sample_batch_steps) == (5, 5, 20)
    assert (config.env_dim, config.start_lr, config.batch_size) == (84, 1e-3, 500)


def test_an_unknown_setting_is_an_error_with_the_nearest_name():
    with pytest.raises(ConfigError, match="did you mean 'start_lr'"):
        A2CConfig.from_dict({"startlr": 1e-3})
