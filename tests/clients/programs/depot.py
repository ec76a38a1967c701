"""A server of the Model Context Protocol over stdio, with one tool: how much of an article is in stock."""

from __future__ import annotations

import json
import sys

TOOL = {
    "name": "stock",
    "description": "How many of an article are in stock.",
    "inputSchema": {"type": "object", "properties": {"article": {"type": "string"}}, "required": ["article"]},
}

for line in sys.stdin:
    asked = json.loads(line)
    if "id" not in asked:
        continue
    match asked["method"]:
        case "initialize":
            result = {
                "protocolVersion": asked["params"]["protocolVersion"],
                "capabilities": {"tools": {}},
                "serverInfo": {"name": "depot", "version": "1"},
            }
        case "tools/list":
            result = {"tools": [TOOL]}
        case "tools/call":
            said = f"stock of {asked['params']['arguments']['article']}: 42"
            result = {"content": [{"type": "text", "text": said}]}
        case _:
            result = {}
    print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": result}), flush=True)
