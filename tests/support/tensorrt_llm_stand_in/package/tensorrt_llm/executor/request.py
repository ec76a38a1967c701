"""A request for a LoRA adapter (1.2 and 1.3)."""

import os
from dataclasses import dataclass

DEFAULT_REQUEST_PRIORITY = 0.5


@dataclass(slots=True)
class LoRARequest:
    lora_name: str
    lora_int_id: int
    lora_path: str = ""
    lora_ckpt_source: str = "hf"

    def __post_init__(self) -> None:
        if self.lora_path is not None and not os.path.exists(self.lora_path):
            raise ValueError(f"lora_path {self.lora_path} does not exist")
        if self.lora_ckpt_source not in ("hf", "nemo"):
            raise ValueError(f"lora_ckpt_source is {self.lora_ckpt_source}")
