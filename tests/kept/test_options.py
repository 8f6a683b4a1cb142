"""Nothing that users type has gone or means something else since the options were recorded."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest

pytest.importorskip("typer")

from kept.program_options import differences, program_options

RECORDED = json.loads((Path(__file__).parent / "options.json").read_text("utf-8"))
now = cache(program_options)


@pytest.mark.parametrize("command", RECORDED)
def test_every_command_has_the_options_that_it_had(command):
    assert command in now(), f"there is no {command} any more"
    lost = differences(command, RECORDED[command], now()[command])
    assert not lost, "\n" + "\n".join(lost)


@pytest.mark.parametrize("flag", ["-h", "--help"])
@pytest.mark.parametrize("command", RECORDED)
def test_every_command_tells_its_options_with_exit_code_0(command, flag, capsys):
    from hdnn.__main__ import main

    assert main([*command.split()[1:], flag]) == 0
    told = capsys.readouterr().out
    assert all(option in told for option in RECORDED[command]["options"])


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
