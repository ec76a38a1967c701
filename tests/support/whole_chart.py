"""Values that use everything the chart has."""

from typing import Any

LOGIN = {"secret": "login"}
EVERYTHING: dict[str, Any] = {
    "nats": {"enabled": True},
    "broker": {"tlsCaSecret": "nats-ca"},
    "frontend": {"apiKeySecret": {"name": "keys"}, "tlsSecret": "tls", "login": LOGIN},
    "router": {"login": LOGIN},
    "planner": {"enabled": True, "login": LOGIN},
    "console": {"enabled": True, "keySecret": {"name": "console"}, "login": LOGIN},
    "steward": {"login": LOGIN},
    "podMonitor": {"enabled": True},
    "pools": {
        "own": {
            "engine": "vllm-cuda",
            "model": "org/Model-1.5",
            "login": LOGIN,
            "hubTokenSecret": {"name": "hub"},
            "modelCache": {"claim": "models"},
            "roles": {
                "aggregated": {"scaling": {"enabled": True}},
                "prefill": {},
                "decode": {},
                "encode": {},
            },
        },
        "plain": {
            "engine": "sglang-cuda",
            "model": "org/moe",
            "login": LOGIN,
            "hubTokenSecret": {"name": "hub"},
            "modelCache": {"claim": "models"},
            "roles": {"aggregated": {"nodes": 2, "scaling": {"enabled": True}}},
        },
        "default": {"roles": {"aggregated": {}}},
        "planned": {"roles": {"decode": {"scaling": {"enabled": True, "by": "planner"}}}},
    },
}
