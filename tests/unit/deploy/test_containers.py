"""Container files build from pinned bases, as a user without rights, and from files that are sent to the builder."""

from __future__ import annotations

import json
import re
import subprocess
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest

from deploy.install import NIXL, SGLANG, TORCH, UV

ROOT = Path(__file__).parents[3]
FILES = sorted((ROOT / "deploy" / "containers").glob("*.Containerfile"))
IGNORED = (ROOT / ".dockerignore").read_text()


def steps(text: str) -> list[tuple[str, str]]:
    """Return the instructions of a container file as (name, arguments)."""
    whole = re.sub(r"\\\n\s*", "", "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#")))
    return [(name.upper(), rest.strip()) for name, _, rest in (line.partition(" ") for line in whole.splitlines() if line)]


def faults(text: str) -> list[str]:
    """Return what is wrong with a container file."""
    found, given = steps(text), {}
    for name, rest in found:
        if name == "ARG" and "=" in rest:
            given[rest.partition("=")[0]] = rest.partition("=")[2]
    wrong = []
    bases = [
        re.sub(r"\$\{(\w+)\}", lambda match: given.get(match[1], ""), rest.split()[0]) for name, rest in found if name == "FROM"
    ]
    wrong += [f"base {base} is not pinned to a patch version" for base in bases if not re.search(r":\d+\.\d+\.\d+", base)]
    last = found[max(at for at, (name, _) in enumerate(found) if name == "FROM") :]
    users = [rest for name, rest in last if name == "USER"]
    if not users or not re.fullmatch(r"[1-9]\d+:[1-9]\d+", users[-1]):
        wrong.append("the last user is not a number above 0")
    entries = [rest for name, rest in last if name == "ENTRYPOINT"]
    if not entries or not entries[-1].startswith("["):
        wrong.append("a shell would stand between SIGTERM and the part")
    for name, rest in found:
        if name == "ADD":
            wrong.append("ADD loads and unpacks unseen")
        if name in ("ENV", "ARG") and re.search(r"(?i)(password|secret|token|_key|seed)", rest):
            wrong.append(f"a secret in {name}")
        if "apt-get install" in rest and not ("--no-install-recommends" in rest and "rm -rf /var/lib/apt/lists" in rest):
            wrong.append("apt leaves its lists or installs what is not needed")
        if name == "RUN" and re.search(r"\bpip\b.*\binstall\b", rest) and "--no-cache-dir" not in rest:
            wrong.append("pip keeps its cache")
        if re.search(r"\b(curl|wget)\b", rest):
            wrong.append("something is loaded without a digest")
    return wrong


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_container_file_is_sound(file: Path) -> None:
    assert faults(file.read_text()) == []


def test_what_is_pinned_beside_the_project_has_the_same_versions_in_images() -> None:
    for file, pins in (("vllm-cpu", (TORCH, UV, *NIXL)), ("sglang-cpu", (TORCH, UV, *NIXL, *SGLANG))):
        text = (ROOT / "deploy" / "containers" / f"{file}.Containerfile").read_text()
        assert [pin for pin in pins if pin not in text] == []


def sent(path: str) -> bool:
    """True if .dockerignore lets a file go to the builder: the last pattern that fits its path or a parent decides."""
    kept = True
    names = [path, *(str(parent) for parent in Path(path).parents if str(parent) != ".")]
    for line in IGNORED.splitlines():
        pattern = line.strip()
        if pattern and not pattern.startswith("#"):
            plain = pattern.removeprefix("!")
            plain = plain.removeprefix("**/") if plain.startswith("**/") else plain
            fits = any(
                (fnmatch(name, plain) and (plain == "*" or name.count("/") == plain.count("/")))
                or (pattern.startswith("**/") and fnmatch(Path(name).name, plain))
                for name in names
            )
            if fits:
                kept = pattern.startswith("!")
    return kept


def test_what_a_wheel_is_built_from_is_sent_and_nothing_secret_is() -> None:
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    packages = ("headrace/", "jetstream/", "broker/", "router/", "workers/", "frontend/", "tools/")
    needed = [path for path in tracked if path.startswith(packages) or path in ("LICENSE", "pyproject.toml", "setup.py")]
    needed += ["docs/package.md", "deploy/locks/base.txt"]
    assert len(needed) > 500
    assert [path for path in needed if not sent(path)] == []
    for path in (".git/config", ".env", "deploy/compose/.env", "tests/conftest.py", "headrace/login.nk", "headrace/x/tls.key"):
        assert not sent(path), path
    assert not any(sent(path) for path in tracked if path.startswith(("tests/", "benchmarks/", "docs/images")))


def test_entry_points_are_programs_of_the_package() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    for file in FILES:
        (entry,) = (json.loads(rest) for name, rest in steps(file.read_text()) if name == "ENTRYPOINT")
        assert entry[0] in scripts
