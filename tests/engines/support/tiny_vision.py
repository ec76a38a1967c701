"""A vision model of a few megabytes with random weights: Idefics3, that is a vision tower, a projection and a Llama.

Of the families that vLLM serves it is one whose code does without torchvision.  An image takes `IMAGE_TOKENS` tokens whatever
its size.  The weights are large enough for answers to differ from image to image, which is all that tests need of them.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

SIDE, PATCH, SCALE = 112, 14, 2
PATCHES = (SIDE // PATCH) ** 2
SEEN = PATCHES // SCALE**2  # vectors that the text model is given of an image
IMAGE_TOKENS = SEEN + 3  # with the tokens that vLLM puts around them
HIDDEN, INNER, LAYERS, HEADS = 64, 128, 2, 2
VISION, VISION_INNER = 32, 64
SPECIAL = ("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>")
VOCABULARY = 49216

TEMPLATE = """{% for message in messages %}<|im_start|>{{ message['role'] }}
{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}\
{% if part['type'] == 'image' %}<image>{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}\
{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def write_vision_model(folder: Path, text_model: Path) -> Path:
    """`text_model` is the folder whose tokenizer it gets."""
    from safetensors.numpy import save_file

    folder.mkdir()
    first = write_tokenizer(folder, text_model, SPECIAL)
    _write(folder / "config.json", _config(image_token=first))
    _write(folder / "preprocessor_config.json", _PROCESSOR)
    _write(folder / "processor_config.json", {"processor_class": "Idefics3Processor", "image_seq_len": SEEN})
    _write(folder / "generation_config.json", {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2})
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    save_file(_weights(), folder / "model.safetensors", {"format": "pt"})
    return folder


def write_tokenizer(folder: Path, text_model: Path, special: Sequence[str]) -> int:
    """That of the text model with more special tokens. Returns the id of the first of these."""
    tokenizer = json.loads((text_model / "tokenizer.json").read_bytes())
    first = 1 + max(*tokenizer["model"]["vocab"].values(), *(token["id"] for token in tokenizer["added_tokens"]))
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    tokenizer["added_tokens"] += [{"id": first + n, "content": text, **flags} for n, text in enumerate(special)]
    _write(folder / "tokenizer.json", tokenizer)
    config = json.loads((text_model / "tokenizer_config.json").read_bytes())
    _write(folder / "tokenizer_config.json", {**config, "extra_special_tokens": list(special)})
    for name in ("special_tokens_map.json",):
        if (text_model / name).is_file():
            shutil.copy(text_model / name, folder / name)
    return int(first)


def _config(*, image_token: int) -> dict[str, Any]:
    return {
        "architectures": ["Idefics3ForConditionalGeneration"],
        "model_type": "idefics3",
        "dtype": "float32",
        "image_token_id": image_token,
        "scale_factor": SCALE,
        "pad_token_id": 2,
        "tie_word_embeddings": False,
        "text_config": {
            "model_type": "llama",
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
        },
        "vision_config": {
            "model_type": "idefics3_vision",
            "hidden_size": VISION,
            "intermediate_size": VISION_INNER,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": 2,
            "image_size": SIDE,
            "patch_size": PATCH,
        },
    }


_PROCESSOR = {
    "image_processor_type": "Idefics3ImageProcessor",
    "do_convert_rgb": True,
    "do_image_splitting": False,
    "do_normalize": True,
    "do_pad": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "max_image_size": {"longest_edge": SIDE},
    "size": {"longest_edge": SIDE},
}


def _weights() -> dict[str, np.ndarray[Any, Any]]:
    shapes = {
        "model.text_model.embed_tokens.weight": (VOCABULARY, HIDDEN),
        "model.text_model.norm.weight": (HIDDEN,),
        "lm_head.weight": (VOCABULARY, HIDDEN),
        "model.connector.modality_projection.proj.weight": (HIDDEN, VISION * SCALE**2),
        "model.vision_model.embeddings.patch_embedding.weight": (VISION, 3, PATCH, PATCH),
        "model.vision_model.embeddings.patch_embedding.bias": (VISION,),
        "model.vision_model.embeddings.position_embedding.weight": (PATCHES, VISION),
        "model.vision_model.post_layernorm.weight": (VISION,),
        "model.vision_model.post_layernorm.bias": (VISION,),
    }
    for n in range(LAYERS):
        shapes |= {f"model.text_model.layers.{n}.{name}.weight": shape for name, shape in _TEXT_LAYER.items()}
        for name, shape in _VISION_LAYER.items():
            shapes[f"model.vision_model.encoder.layers.{n}.{name}.weight"] = shape
            shapes[f"model.vision_model.encoder.layers.{n}.{name}.bias"] = shape[:1]
    random = np.random.default_rng(11)
    return {name: _tensor(random, name, shape) for name, shape in shapes.items()}


_HEAD = HIDDEN // HEADS
_TEXT_LAYER: dict[str, tuple[int, ...]] = {
    "input_layernorm": (HIDDEN,),
    "post_attention_layernorm": (HIDDEN,),
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (_HEAD, HIDDEN),
    "self_attn.v_proj": (_HEAD, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (INNER, HIDDEN),
    "mlp.up_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
}
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
    if "norm" in name and name.endswith("weight"):
        return np.ones(shape, np.float32)
    drawn = random.standard_normal(shape).astype(np.float32)
    return drawn / np.float32(np.sqrt(np.prod(shape[1:]))) if len(shape) > 1 else drawn * np.float32(0.1)


def _write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value))
