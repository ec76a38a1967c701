"""Lets the processes of one SGLang meet in memory of their own.

Left alone they meet at PyTorch's store over TCP, which listens on every address of the machine and asks for no login.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from typing import Any

METHOD = "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"
"""SGLang's variable for the place where its processes meet."""


def use_local_store(args: Mapping[str, Any], environ: MutableMapping[str, str]) -> None:
    """Name a file in memory as the place, by this process, whose end is the file's.

    Not where SGLang runs on several machines or as several replicas, and not where the operator has named a place.
    """
    apart = int(args.get("nnodes") or 1) > 1 or int(args.get("dp_size") or 1) > 1
    if apart or args.get("dist_init_addr") or METHOD in environ:
        return
    environ[METHOD] = f"file:///proc/{os.getpid()}/fd/{os.memfd_create('headrace-sglang')}"
