"""config.py: each default stands once, and it can be read without any library."""

import ast
import sys

from config import CUSTOM_SIZES, DEFAULTS, KNOBS, OTHER_DEFAULTS
from custom_model import CustomGPTConfig
from helpers import REPOSITORY


def test_the_custom_model_has_the_defaults_of_the_configuration():
    sizes = {name: getattr(CustomGPTConfig(), name) for name in CUSTOM_SIZES}
    assert sizes == {name: DEFAULTS[name] for name in CUSTOM_SIZES}


def test_no_variable_or_flag_stands_twice():
    assert len({knob.variable for knob in KNOBS}) == len({knob.flag for knob in KNOBS}) == len(KNOBS)
    assert not DEFAULTS.keys() & OTHER_DEFAULTS.keys()


def test_the_configuration_needs_the_standard_library_alone():
    """job.sh reads it with whatever Python there is."""
    tree = ast.parse((REPOSITORY / "scripts" / "config.py").read_text())
    imported = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    imported += [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert {each.split(".")[0] for each in imported} <= sys.stdlib_module_names
