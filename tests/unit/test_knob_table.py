"""knobs.py: each default stands once, it can be read without any library, and its lines are those the shell reads."""

import ast
import dataclasses
import sys

import pytest

import knobs
from custom_model import CustomGPTConfig
from helpers import REPOSITORY
from knobs import CUSTOM_SIZES, DEFAULTS, KNOBS, DataArguments, ModelArguments


def test_flags_and_the_custom_model_have_the_defaults_of_the_table():
    flags = {
        field.name: field.default for kind in (ModelArguments, DataArguments) for field in dataclasses.fields(kind)
    }
    assert flags == {name: DEFAULTS[name] for name in flags}
    sizes = {name: getattr(CustomGPTConfig(), name) for name in CUSTOM_SIZES}
    assert sizes == {name: DEFAULTS[name] for name in CUSTOM_SIZES}


def test_no_variable_or_flag_stands_twice():
    assert len({knob.variable for knob in KNOBS}) == len({knob.flag for knob in KNOBS}) == len(KNOBS)
    assert not DEFAULTS.keys() & knobs.OTHER_DEFAULTS.keys()


@pytest.mark.parametrize("name", ["knobs", "errors"])
def test_the_table_needs_the_standard_library_alone(name):
    """job.sh reads it with whatever Python there is."""
    tree = ast.parse((REPOSITORY / "scripts" / f"{name}.py").read_text())
    imported = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    imported += [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert {each.split(".")[0] for each in imported} <= sys.stdlib_module_names | {"errors"}
