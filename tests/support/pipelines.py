"""Folders of diffusion pipelines, as diffusers saves them: tiny ones with random weights, made in a second."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def tiny_pictures(folder: Path) -> Path:
    """Write a Stable Diffusion of 200 kB, whose pictures are 64 pixels wide and high."""
    import torch
    from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
    from transformers import CLIPTextConfig, CLIPTextModel

    torch.manual_seed(0)
    blocks: dict[str, Any] = {"block_out_channels": (8, 16), "layers_per_block": 1, "norm_num_groups": 4}
    unet = UNet2DConditionModel(
        **blocks,
        sample_size=32,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=16,
        attention_head_dim=2,
    )
    vae = AutoencoderKL(
        **blocks,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4,
    )
    about = CLIPTextConfig(
        vocab_size=258,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=77,
        bos_token_id=256,
        eos_token_id=257,
        pad_token_id=257,
    )
    StableDiffusionPipeline(
        vae=vae,
        text_encoder=CLIPTextModel(about),
        tokenizer=_tokenizer(77),
        unet=unet,
        scheduler=DDIMScheduler(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    ).save_pretrained(folder)
    return folder


def tiny_videos(folder: Path) -> Path:
    """Write a Wan of 300 kB."""
    import torch
    from diffusers import AutoencoderKLWan, FlowMatchEulerDiscreteScheduler, WanPipeline, WanTransformer3DModel
    from transformers import UMT5Config, UMT5EncoderModel

    torch.manual_seed(0)
    vae = AutoencoderKLWan(
        base_dim=3, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True]
    )
    transformer = WanTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=12,
        text_dim=16,
        freq_dim=32,
        ffn_dim=32,
        num_layers=1,
        rope_max_seq_len=64,
    )
    about = UMT5Config(vocab_size=258, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, pad_token_id=257)
    WanPipeline(
        tokenizer=_tokenizer(512),
        text_encoder=UMT5EncoderModel(about),
        transformer=transformer,
        vae=vae,
        scheduler=FlowMatchEulerDiscreteScheduler(),
    ).save_pretrained(folder)
    return folder


def _tokenizer(longest: int) -> Any:
    """Return a tokenizer with a token per byte, and two beside."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = {letter: number for number, letter in enumerate(letters)} | {"<s>": 256, "</s>": 257}
    made = Tokenizer(models.BPE(vocab=names, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 256), ("</s>", 257)])
    return PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", pad_token="</s>", model_max_length=longest
    )
