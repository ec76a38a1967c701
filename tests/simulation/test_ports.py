"""The simulated connection offers what the ports ask for, no less and under the same names."""

import inspect

import pytest

from headrace.jetstream import ports
from tests.simulation.virtual.bucket_client import SimBucket, SimWatch
from tests.simulation.virtual.follow import SimFollow
from tests.simulation.virtual.messaging import SimMessaging, SimSubscription
from tests.simulation.virtual.objects import SimObjects, SimObjectWriter
from tests.simulation.virtual.pull import SimDelivery, SimPullLoop

PAIRS = [
    (ports.Messaging, SimMessaging),
    (ports.Bucket, SimBucket),
    (ports.ObjectBucket, SimObjects),
    (ports.ObjectWriter, SimObjectWriter),
    (ports.Watch, SimWatch),
    (ports.Subscription, SimSubscription),
    (ports.PullLoop, SimPullLoop),
    (ports.Delivery, SimDelivery),
    (ports.Follow, SimFollow),
]


@pytest.mark.parametrize(("port", "made"), PAIRS)
def test_every_call_of_a_port_exists_with_the_same_parameters(port, made):
    for name, wanted in vars(port).items():
        if name.startswith("_"):
            continue
        assert hasattr(made, name), name
        if inspect.isfunction(wanted):
            offered = getattr(made, name)
            assert inspect.iscoroutinefunction(offered) == inspect.iscoroutinefunction(wanted), name
            ours, theirs = (
                {n: (p.kind, p.default) for n, p in inspect.signature(f).parameters.items()} for f in (offered, wanted)
            )
            assert ours == theirs, name
