"""vLLM's end of what encode workers hand over: an EC connector that vLLM loads by its path.

It does no I/O but with a folder of its own worker (`item_folder.py`); whether and from where an item comes is the worker's
business. In the scheduler it says which items are there, having read and checked them, and gives them to the model's process
with the step that needs them: between the two nothing can vanish. Whatever is absent or does not fit is encoded by this engine.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase, ECConnectorMetadata, ECConnectorRole
from vllm.logger import init_logger

from headrace.workers.vllm.embeddings import FOLDER, Embeddings, ItemFolder, UnusableEmbeddings, pack, unpack

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


logger = init_logger(__name__)


@dataclass
class GivenItems(ECConnectorMetadata):  # type: ignore[misc]  # vLLM is untyped
    """The items of a step that the encoder need not compute, by name, as tensors in the host's memory."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)


class EmbeddingConnector(ECConnectorBase):  # type: ignore[misc]
    """Passes embeddings on inside one engine: an object in the scheduler, and one in each process of the model."""

    def __init__(self, vllm_config: VllmConfig, role: ECConnectorRole) -> None:
        super().__init__(vllm_config=vllm_config, role=role)
        config = vllm_config.ec_transfer_config
        assert config is not None  # the base class has refused its absence  # noqa: S101
        self._folder = ItemFolder(Path(config.get_from_extra_config(FOLDER, "")))
        model = vllm_config.model_config
        self._dtype = str(model.dtype).removeprefix("torch.")
        self._width = model.get_inputs_embeds_size()
        self._rows: dict[str, int] = {}  # of the items of requests that the scheduler looks at
        self._read: dict[str, torch.Tensor] = {}
        self._step: dict[str, torch.Tensor] = {}

    # -- in the scheduler --------------------------------------------------------------------------------------

    def ensure_cache_available(self, request: Request, num_computed_tokens: int) -> bool:
        """Note how long the items of a request have to be. Nothing is waited for: the worker has done that."""
        if self.is_consumer:
            for feature in request.mm_features:
                self._rows[feature.identifier] = feature.mm_position.get_num_embeds()
        return True

    def has_cache_item(self, identifier: str) -> bool:
        """Return whether the encoder need not compute an item. It is in memory then."""
        if not self.is_consumer:
            return False
        if identifier in self._read or identifier in self._step:
            return True
        record = self._folder.read(identifier)
        if record is None:
            return False
        try:
            self._read[identifier] = self._tensor(identifier, unpack(record))
        except UnusableEmbeddings as error:
            logger.warning("Headrace: item %s is encoded here: %s", identifier, error)
            return False
        return True

    def _tensor(self, identifier: str, given: Embeddings) -> torch.Tensor:
        rows = self._rows.get(identifier)
        if given.dtype != self._dtype or given.rows != rows or given.width % self._width:
            raise UnusableEmbeddings(
                f"{given.rows} rows of {given.width} × {given.dtype}, for {rows} of {self._width} × {self._dtype}"
            )
        flat = torch.frombuffer(bytearray(given.data), dtype=getattr(torch, given.dtype))
        return flat.view(given.rows, given.width)

    def update_state_after_alloc(self, request: Request, index: int) -> None:
        identifier = request.mm_features[index].identifier
        tensor = self._read.pop(identifier, None)
        if tensor is not None:
            self._step[identifier] = tensor

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> GivenItems:
        given, self._step = self._step, {}
        self._read.clear()  # of a step that had no room for them: they are read again
        self._rows.clear()
        return GivenItems(given)

    # -- beside the model --------------------------------------------------------------------------------------

    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor], **kwargs: Any) -> None:
        from vllm.platforms import current_platform

        metadata = self._get_connector_metadata()
        assert isinstance(metadata, GivenItems)  # made by `build_connector_meta`  # noqa: S101
        device = current_platform.device_type
        if current_platform.is_cuda_alike():
            device = f"{device}:{current_platform.current_device()}"
        for identifier, tensor in metadata.tensors.items():
            if identifier not in encoder_cache:
                encoder_cache[identifier] = tensor.to(device)

    def save_caches(self, encoder_cache: dict[str, torch.Tensor], mm_hash: str, **kwargs: Any) -> None:
        """Write what the encoder made of an item. What cannot be written is not there: its worker says so."""
        if not self.is_producer or not self._first_rank():
            return
        tensor = encoder_cache[mm_hash].detach().to("cpu").contiguous()
        if tensor.dim() != 2:
            logger.warning("Headrace: the encoder's output has the shape %s, not rows of numbers", tuple(tensor.shape))
            return
        rows, width = tensor.shape
        data = tensor.view(torch.uint8).numpy().tobytes()
        try:
            self._folder.write(mm_hash, pack(Embeddings(rows, width, str(tensor.dtype).removeprefix("torch."), data)))
        except (OSError, UnusableEmbeddings) as error:
            logger.warning("Headrace: the embeddings of item %s are not handed over: %s", mm_hash, error)

    @staticmethod
    def _first_rank() -> bool:
        from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

        return bool(get_tensor_model_parallel_rank() == 0)
