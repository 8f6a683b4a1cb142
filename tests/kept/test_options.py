"""Nothing that users type has gone or means something else since the options were recorded."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest

pytest.importorskip("typer")

from hdnn.__main__ import main
from kept.program_options import differences, experiment_options, program_options

HERE = Path(__file__).parent
RECORDED = json.loads((HERE / "options.json").read_text("utf-8"))
EXPERIMENTS = json.loads((HERE / "experiments.json").read_text("utf-8"))
now = cache(program_options)


@pytest.mark.parametrize("command", RECORDED)
def test_every_command_has_the_options_that_it_had(command):
    assert command in now(), f"there is no {command} any more"
    lost = differences(command, RECORDED[command], now()[command])
    assert not lost, "\n" + "\n".join(lost)


@pytest.mark.parametrize("flag", ["-h", "--help"])
@pytest.mark.parametrize("command", RECORDED)
def test_every_command_tells_its_options_with_exit_code_0(command, flag, capsys):
    assert main([*command.split()[1:], flag]) == 0
    told = capsys.readouterr().out
    assert all(option in told for option in RECORDED[command]["options"])


def test_every_experiment_has_the_options_that_it_had():
    now = experiment_options()
    lost = [
        f"hdnn reproduce {name} has no {option} any more"
        for name, options in EXPERIMENTS.items()
        for option in options
        if option not in now[name]
    ]
    assert not lost, "\n" + "\n".join(lost)


def test_a_changed_option_is_named():
    before = RECORDED["hdnn certify"]
    options = {**before["options"], "--samples": {**before["options"]["--samples"], "default": 9}}
    del options["--run"]
    changed = {**before, "options": options, "has an example": False}
    assert differences("hdnn certify", before, changed) == [
        "hdnn certify has no --run any more",
        "hdnn certify --samples has default 9, not 1000",
        "hdnn certify --help shows no example any more",
    ]
    assert differences("hdnn certify", before, before) == []
