"""Room for LoRA adapters (1.2 and 1.3)."""

from dataclasses import dataclass, field


@dataclass
class LoraConfig:
    lora_dir: list[str] = field(default_factory=list)
    lora_ckpt_source: str = "hf"
    max_lora_rank: int = 64
    lora_target_modules: list[str] = field(default_factory=list)
    trtllm_modules_to_hf_modules: dict[str, str] = field(default_factory=dict)
    max_loras: int | None = None
    max_cpu_loras: int | None = None
    swap_gate_up_proj: bool = True

    def __post_init__(self) -> None:
        if self.lora_ckpt_source not in ("hf", "nemo"):
            raise AssertionError(f"lora_ckpt_source is {self.lora_ckpt_source}")
