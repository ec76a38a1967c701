"""What a test asks the process in which vLLM computes (`worker_extension_cls`)."""

from __future__ import annotations

import os


class CoreThreads:
    """Added to vLLM's worker."""

    def computing_threads(self) -> list[int]:
        """PyTorch's threads, and those that vLLM sets around its own calls of a processor."""
        import torch

        return [torch.get_num_threads(), int(os.environ["OMP_NUM_THREADS"])]
