"""config.py defines each default once and imports only the standard library."""

import ast
import sys

from config import CUSTOM_SIZES, DEFAULTS, KNOBS, OTHER_DEFAULTS
from helpers import REPOSITORY
from models.custom_model import CustomGPTConfig


def test_the_custom_model_has_the_defaults_of_the_configuration():
    sizes = {name: getattr(CustomGPTConfig(), name) for name in CUSTOM_SIZES}
    assert sizes == {name: DEFAULTS[name] for name in CUSTOM_SIZES}


def test_no_variable_or_flag_is_defined_twice():
    assert len({knob.variable for knob in KNOBS}) == len({knob.flag for knob in KNOBS}) == len(KNOBS)
    assert not DEFAULTS.keys() & OTHER_DEFAULTS.keys()


def test_the_configuration_needs_only_the_standard_library():
    """Many programs import config.py, and should not wait for PyTorch."""
    tree = ast.parse((REPOSITORY / "scripts" / "config.py").read_text())
    imported = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    imported += [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert {each.split(".")[0] for each in imported} <= sys.stdlib_module_names
