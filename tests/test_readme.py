"""What README.md says exists, and is what the code says."""

import dataclasses
import re

import pytest
from cluster_tools import ROOT

from a2c_config import PRESETS, A2CConfig

README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"(?:bash|python) ((?:scripts/|examples/)?\w+\.(?:sh|py))", README)


@pytest.mark.parametrize("setting", dataclasses.fields(A2CConfig), ids=lambda setting: setting.name)
def test_every_option_stands_in_its_table_with_default_and_meaning(setting):
    default = "" if setting.default is None else setting.default
    meaning = setting.metadata["help"].replace("|", "\\|")
    assert f"| `--{setting.name}` | {default} | {meaning} |" in README


def test_every_preset_is_named():
    assert all(f"--preset {name}" in README for name in PRESETS)


def test_every_command_and_every_file_exists():
    files = (
        set(COMMANDS) | set(re.findall(r"`(\w+\.py)`", README)) | set(re.findall(r"\]\((docs/[^)]+)\)", README))
    )
    assert len(files) > 20
    assert [file for file in files if not (ROOT / file).exists()] == []


def test_every_module_is_in_the_table_of_files():
    assert [path.name for path in ROOT.glob("*.py") if f"`{path.name}`" not in README] == []


def test_every_option_of_a_train_command_exists():
    names = {f"--{setting.name}" for setting in dataclasses.fields(A2CConfig)} | {
        "--preset",
        "--config",
        "--resume",
        "--help",
    }
    options = {
        option
        for line in re.findall(r"(?:python train\.py|scripts/train\.sh)([^`\n#]*)", README)
        for option in re.findall(r"--\w+", line)
    }
    assert options and options <= names
