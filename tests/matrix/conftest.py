"""`pytest tests/matrix --model mypkg.nets:build` adds a model to the matrix."""

import pkgutil

import pytest
from models import MODELS, Model


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--model`, any number of times."""
    parser.addoption("--model", action="append", default=[], help="package.module:function that returns a model")


def pytest_configure(config: pytest.Config) -> None:
    """Add the models named."""
    for name in config.getoption("--model", []):
        MODELS[name] = Model(pkgutil.resolve_name(name))
