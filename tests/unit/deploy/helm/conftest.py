"""The objects that the chart makes when everything it has is used."""

import pytest

from deploy.kubernetes.write import rendered
from tests.support.kubernetes_objects import Object
from tests.support.whole_chart import EVERYTHING


@pytest.fixture(scope="package")
def everything() -> list[Object]:
    return rendered(EVERYTHING)
