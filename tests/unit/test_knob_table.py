"""knobs.py: each default stands once, it can be read without any library, and its lines are those the shell reads."""

import ast
import dataclasses
import sys

import pytest

import knobs
from custom_model import CustomGPTConfig
from helpers import REPOSITORY
from knobs import CUSTOM_SIZES, DEFAULTS, KNOBS, DataArguments, ModelArguments

FIELDS = [*dataclasses.fields(ModelArguments), *dataclasses.fields(DataArguments)]


@pytest.mark.parametrize("field", FIELDS, ids=lambda field: field.name)
def test_a_flag_has_the_default_of_the_table(field):
    assert field.default == DEFAULTS[field.name]
    assert type(field.default) is type(DEFAULTS[field.name])


def test_the_custom_model_has_the_sizes_of_the_table():
    config = CustomGPTConfig()
    assert {name: getattr(config, name) for name in CUSTOM_SIZES} == {name: DEFAULTS[name] for name in CUSTOM_SIZES}


def test_no_variable_or_flag_stands_twice():
    for names in ([knob.variable for knob in KNOBS], [knob.flag for knob in KNOBS]):
        assert len(set(names)) == len(names)
    assert not DEFAULTS.keys() & knobs.OTHER_DEFAULTS.keys()


@pytest.mark.parametrize("name", ["knobs", "errors"])
def test_the_table_needs_the_standard_library_alone(name):
    tree = ast.parse((REPOSITORY / "scripts" / f"{name}.py").read_text())
    imported = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    imported += [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert {each.split(".")[0] for each in imported} <= sys.stdlib_module_names | {"errors"}


def test_a_line_is_the_variable_the_flag_and_the_default(main_of, capsys):
    main_of(knobs)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" ", 2)[:2] for line in lines] == [[knob.variable, f"--{knob.flag}"] for knob in KNOBS]
    assert "TRAIN_SIZE --train_size 500" in lines
    assert "FROM_SCRATCH --from_scratch False" in lines
    assert [line.split(" ", 2)[2] for line in lines] == [
        "" if knob.default is None else str(knob.default) for knob in KNOBS
    ]
