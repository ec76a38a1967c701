"""Leaves the compiled modules of the router out of a wheel where HEADRACE_PURE is set. All else is in pyproject.toml."""

from __future__ import annotations

import os
from typing import Any

from setuptools import Distribution, setup


class PureDistribution(Distribution):
    """A distribution without extension modules, whose wheel runs on every machine."""

    def parse_config_files(self, *args: Any, **kwargs: Any) -> None:
        super().parse_config_files(*args, **kwargs)
        self.ext_modules = []


setup(distclass=PureDistribution if os.environ.get("HEADRACE_PURE") else Distribution)
