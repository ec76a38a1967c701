"""An object store of the deployment, empty."""

import pytest

from headrace.jetstream.client import Connection
from headrace.jetstream.objects import ObjectStore
from headrace.jetstream.subjects import Subjects


@pytest.fixture
def files(connection: Connection, subjects: Subjects) -> ObjectStore:
    return connection.objects(subjects.bucket("files"))
