"""A model of some tens of megabytes with random weights that takes videos and images: Ovis2.5 over a small Llama.

Of the families with videos that vLLM serves it is one whose code and processor do without torchvision. Its folder brings the
class of its configuration, as published Ovis models do (`trust_remote_code`). A frame takes `FRAME_TOKENS` tokens whatever its
size.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

PATCH, STRIDE = 112, 2
FRAME_TOKENS = (448 // (PATCH * STRIDE)) ** 2  # the processor makes each frame 448 × 448
HIDDEN, INNER, LAYERS, HEADS = 64, 128, 2, 2
VISION, VISION_INNER = 32, 64
VISUAL_WORDS = 256

# Ids that vLLM's code for the family has as constants.
PAD, FIRST_SPECIAL = 151655, 151669
SPECIAL = (
    "<image>",
    "<video>",
    "<ovis_visual_atom>",
    "<ovis_image_start>",
    "<ovis_image_end>",
    "<ovis_video_start>",
    "<ovis_video_end>",
)
VOCABULARY = FIRST_SPECIAL + len(SPECIAL)

TEMPLATE = """{% for message in messages %}<|im_start|>{{ message['role'] }}
{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}\
{% if part['type'] in ('image', 'video') %}<{{ part['type'] }}>{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}\
{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

CODE = """from transformers import AutoConfig, LlamaConfig, PretrainedConfig


class VisionConfig(PretrainedConfig):
    model_type = "siglip2_navit"


class TinyOvisConfig(PretrainedConfig):
    model_type = "ovis2_5"
    sub_configs = {"llm_config": LlamaConfig, "vit_config": VisionConfig}

    def __init__(self, llm_config=None, vit_config=None, visual_vocab_size=0, hidden_size=0, **kwargs):
        self.llm_config = LlamaConfig(**(llm_config or {})) if not isinstance(llm_config, LlamaConfig) else llm_config
        self.vit_config = VisionConfig(**(vit_config or {})) if not isinstance(vit_config, VisionConfig) else vit_config
        self.visual_vocab_size = visual_vocab_size
        self.hidden_size = hidden_size
        super().__init__(**kwargs)

    def get_text_config(self, *args, **kwargs):
        return self.llm_config

    @property
    def text_config(self):
        return self.llm_config
"""


def write_video_model(folder: Path, text_model: Path) -> Path:
    """`text_model` is the folder whose tokenizer it gets."""
    from safetensors.numpy import save_file

    folder.mkdir()
    _write_tokenizer(folder, text_model)
    (folder / "configuration_tiny_ovis.py").write_text(CODE)
    _write(folder / "config.json", _CONFIG)
    _write(folder / "preprocessor_config.json", _PROCESSOR)
    _write(folder / "generation_config.json", {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2})
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    save_file(_weights(), folder / "model.safetensors", {"format": "pt"})
    return folder


def _write_tokenizer(folder: Path, text_model: Path) -> None:
    """That of the text model, filled up so that the special tokens have the ids that vLLM's code expects."""
    tokenizer = json.loads((text_model / "tokenizer.json").read_bytes())
    words = tokenizer["model"]["vocab"]
    first = 1 + max(*words.values(), *(token["id"] for token in tokenizer["added_tokens"]))
    words |= {f"<fill{number}>": number for number in range(first, FIRST_SPECIAL) if number != PAD}
    words["<|image_pad|>"] = PAD
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    added = [(PAD, "<|image_pad|>"), *((FIRST_SPECIAL + n, text) for n, text in enumerate(SPECIAL))]
    tokenizer["added_tokens"] += [{"id": number, "content": text, **flags} for number, text in added]
    _write(folder / "tokenizer.json", tokenizer)
    config = json.loads((text_model / "tokenizer_config.json").read_bytes())
    _write(folder / "tokenizer_config.json", {**config, "extra_special_tokens": ["<|image_pad|>", *SPECIAL]})


_CONFIG: dict[str, Any] = {
    "architectures": ["Ovis2_5"],
    "model_type": "ovis2_5",
    "auto_map": {"AutoConfig": "configuration_tiny_ovis.TinyOvisConfig"},
    "dtype": "float32",
    "hidden_size": HIDDEN,
    "visual_vocab_size": VISUAL_WORDS,
    "tie_word_embeddings": False,
    "llm_config": {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": 1,
        "head_dim": HIDDEN // HEADS,
        "max_position_embeddings": 2048,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "tie_word_embeddings": False,
    },
    "vit_config": {
        "hidden_size": VISION,
        "intermediate_size": VISION_INNER,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_channels": 3,
        "num_patches": -1,
        "image_size": 448,
        "patch_size": PATCH,
        "hidden_stride": STRIDE,
        "temporal_patch_size": 1,
        "window_size": PATCH * STRIDE,
        "fullatt_block_indexes": None,
        "preserve_original_pe": False,
        "use_rope": True,
        "hidden_act": "gelu_pytorch_tanh",
        "attention_dropout": 0.0,
        "layer_norm_eps": 1e-6,
    },
}

_PROCESSOR = {
    "image_processor_type": "SiglipImageProcessor",
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "size": {"height": 448, "width": 448},
}


def _weights() -> dict[str, np.ndarray[Any, Any]]:
    head, merged = HIDDEN // HEADS, VISION * STRIDE**2
    words = VISUAL_WORDS - 4  # the last four stand for the beginnings and ends of items
    vision, text = "visual_tokenizer.vit.vision_model.", "llm.model."
    shapes: dict[str, tuple[int, ...]] = {
        f"{text}embed_tokens.weight": (VOCABULARY, HIDDEN),
        f"{text}norm.weight": (HIDDEN,),
        "llm.lm_head.weight": (VOCABULARY, HIDDEN),
        f"{vision}embeddings.patch_embedding.weight": (VISION, 3, PATCH, PATCH),
        f"{vision}embeddings.patch_embedding.bias": (VISION,),
        f"{vision}post_layernorm.weight": (VISION,),
        f"{vision}post_layernorm.bias": (VISION,),
        "visual_tokenizer.head.0.weight": (words, merged),
        "visual_tokenizer.head.1.weight": (words,),
        "visual_tokenizer.head.1.bias": (words,),
        "vte.weight": (VISUAL_WORDS, HIDDEN),
    }
    for n in range(LAYERS):
        layer = f"{text}layers.{n}."
        shapes |= {
            f"{layer}input_layernorm.weight": (HIDDEN,),
            f"{layer}post_attention_layernorm.weight": (HIDDEN,),
            f"{layer}self_attn.q_proj.weight": (HIDDEN, HIDDEN),
            f"{layer}self_attn.k_proj.weight": (head, HIDDEN),
            f"{layer}self_attn.v_proj.weight": (head, HIDDEN),
            f"{layer}self_attn.o_proj.weight": (HIDDEN, HIDDEN),
            f"{layer}mlp.gate_proj.weight": (INNER, HIDDEN),
            f"{layer}mlp.up_proj.weight": (INNER, HIDDEN),
            f"{layer}mlp.down_proj.weight": (HIDDEN, INNER),
        }
    for name, shape in _VISION_LAYER.items():
        shapes[f"{vision}encoder.layers.0.{name}.weight"] = shape
        shapes[f"{vision}encoder.layers.0.{name}.bias"] = shape[:1]
    random = np.random.default_rng(12)
    return {name: _tensor(random, name, shape) for name, shape in shapes.items()}


_VISION_LAYER: dict[str, tuple[int, ...]] = {
    "layer_norm1": (VISION,),
    "layer_norm2": (VISION,),
    "self_attn.q_proj": (VISION, VISION),
    "self_attn.k_proj": (VISION, VISION),
    "self_attn.v_proj": (VISION, VISION),
    "self_attn.out_proj": (VISION, VISION),
    "mlp.fc1": (VISION_INNER, VISION),
    "mlp.fc2": (VISION, VISION_INNER),
}


def _tensor(random: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    if name.endswith("head.1.weight"):
        return np.full(shape, 4.0, np.float32)  # so that the words of two frames differ
    if "norm" in name and name.endswith("weight"):
        return np.ones(shape, np.float32)
    drawn = random.standard_normal(shape).astype(np.float32)
    if name == "vte.weight":
        return drawn
    return drawn / np.float32(np.sqrt(np.prod(shape[1:]))) if len(shape) > 1 else drawn * np.float32(0.1)


def _write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value))
