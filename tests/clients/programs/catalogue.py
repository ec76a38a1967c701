"""The agents that are tried: how each is configured and started, and what the simulator answers it in the course of a task.

The task: list a folder, read a file of it, write another, run a program, ask an MCP server, and say what came of it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

DEPOT = Path(__file__).with_name("depot.py")
MODEL = "acme/chat"
LEDGER = {"ledger.txt": "pears 17\n", "check.sh": 'echo "checked $(wc -l < report.txt) line"\n'}
REPORT = "pears: 17\n"
DONE = "The ledger says 17 pears, the depot has 42."
# No program may report, update itself or look for models anywhere: what is not this machine leads to a closed port.
QUIET = {
    "HTTPS_PROXY": "http://127.0.0.1:9",
    "HTTP_PROXY": "http://127.0.0.1:9",
    "NO_PROXY": "127.0.0.1,localhost",
    "DISABLE_AUTOUPDATER": "1",
    "DISABLE_ERROR_REPORTING": "1",
    "DISABLE_TELEMETRY": "1",
    "OPENCODE_DISABLE_AUTOUPDATE": "1",
    "OPENCODE_DISABLE_MODELS_FETCH": "1",
}


def call(name: str, **arguments: object) -> str:
    return f"<think>So be it.</think>Next.\n<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@dataclass(frozen=True)
class Program:
    """An agent: `files` go into its home, `steps` are what its task has said so far, as a pattern, and the answer to that."""

    name: str
    words: list[str]
    env: Callable[[str, Path], dict[str, str]]
    files: Callable[[str], dict[str, str]]
    steps: Callable[[Path], list[tuple[str, str]]]

    @property
    def task(self) -> str:
        return f"Do the stocktaking of {self.name}."

    def rules(self, folder: Path) -> list[dict[str, str]]:
        steps = [*self.steps(folder), ("stock of pears: 42", DONE)]
        return [{"when": f"(?s){self.task}.*{seen}", "say": answer} for seen, answer in reversed(steps)]


def codex(_: Path) -> list[tuple[str, str]]:
    return [
        ("", call("exec_command", cmd="ls")),
        ("ledger.txt", call("exec_command", cmd="cat ledger.txt")),
        ("pears 17", call("exec_command", cmd="echo 'pears: 17' >report.txt && echo wrote $((1 + 1)) words")),
        ("wrote 2 words", call("exec_command", cmd="sh check.sh")),
        ("checked 1 line", call("mcp__depot__stock", article="pears")),
    ]


def codex_files(url: str) -> dict[str, str]:
    config = f"""\
model = "{MODEL}"
model_provider = "headrace"
check_for_update_on_startup = false

[model_providers.headrace]
name = "Headrace"
base_url = "{url}/v1"
wire_api = "responses"

[mcp_servers.depot]
command = "{sys.executable}"
args = ["{DEPOT}"]
"""
    return {".codex/config.toml": config}


def claude(folder: Path) -> list[tuple[str, str]]:
    return [
        ("", call("Bash", command="ls", description="List the files")),
        ("ledger.txt", call("Read", file_path=f"{folder}/ledger.txt")),
        ("pears 17", call("Write", file_path=f"{folder}/report.txt", content=REPORT)),
        ("report.txt", call("Bash", command="sh check.sh", description="Check the report")),
        ("checked 1 line", call("ToolSearch", query="select:mcp__depot__stock")),
        ("stock can be called", call("mcp__depot__stock", article="pears")),
    ]


SERVERS = {"mcpServers": {"depot": {"command": sys.executable, "args": [str(DEPOT)]}}}


def qwen(folder: Path) -> list[tuple[str, str]]:
    return [
        ("", call("glob", pattern="*")),
        ("ledger.txt", call("read_file", file_path=f"{folder}/ledger.txt")),
        ("pears 17", call("write_file", file_path=f"{folder}/report.txt", content=REPORT)),
        ("report.txt", call("run_shell_command", command="sh check.sh", is_background=False)),
        ("checked 1 line", call("tool_search", query="select:mcp__depot__stock")),
        ("<function>", call("mcp__depot__stock", article="pears")),
    ]


def opencode(folder: Path) -> list[tuple[str, str]]:
    return [
        ("", call("bash", command="ls", description="List the files")),
        ("ledger.txt", call("read", filePath=f"{folder}/ledger.txt")),
        ("pears 17", call("write", filePath=f"{folder}/report.txt", content=REPORT)),
        ("Wrote file", call("bash", command="sh check.sh", description="Check the report")),
        ("checked 1 line", call("depot_stock", article="pears")),
    ]


def opencode_files(url: str) -> dict[str, str]:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "Headrace",
        "options": {"baseURL": f"{url}/v1"},
        "models": {MODEL: {"name": MODEL}},
    }
    depot = {"type": "local", "command": [sys.executable, str(DEPOT)]}
    config = {"model": f"headrace/{MODEL}", "provider": {"headrace": provider}, "mcp": {"depot": depot}}
    return {".config/opencode/opencode.json": json.dumps(config)}


PROGRAMS = [
    Program(
        "codex",
        ["codex", "exec", "--json", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"],
        lambda url, home: {},
        codex_files,
        codex,
    ),
    Program(
        "claude",
        [
            "claude",
            "--output-format=json",
            "--allowedTools=Bash,Read,Write,mcp__depot__stock",
            "--mcp-config={home}/mcp.json",
            "-p",
        ],
        lambda url, home: {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_AUTH_TOKEN": "none", "ANTHROPIC_MODEL": MODEL},
        lambda url: {"mcp.json": json.dumps(SERVERS)},
        claude,
    ),
    Program(
        "qwen",
        ["qwen", "--auth-type=openai", "--yolo", "--output-format=json"],
        lambda url, home: {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": "none", "OPENAI_MODEL": MODEL},
        lambda url: {".qwen/settings.json": json.dumps({**SERVERS, "privacy": {"usageStatisticsEnabled": False}})},
        qwen,
    ),
    Program("opencode", ["opencode", "run", "--format=json"], lambda url, home: {}, opencode_files, opencode),
]
# What they ask beside the task: names for it, and whether something of it is to be remembered.
ASIDE = "Generate a title|Existing memory files"
