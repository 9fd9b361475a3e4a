"""A tiny random model over the small vocabulary, on the CPU engine."""

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.worker.structured.vocabulary import EOS_IDS, VOCAB_SIZE
from worker.checkpoint.open import open_checkpoint
from worker.engine.cpu import CpuEngine, CpuEngineConfig, open_cpu_engine

MAX_CONTEXT = 512
PAGE_SIZE = 8


def write_model(folder: Path) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=MAX_CONTEXT,
        bos_token_id=0,
        eos_token_id=list(EOS_IDS),
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.normal_(1.0 if "norm" in name else 0.0, 0.2)
    model.save_pretrained(folder)


def open_engine(folder: Path, *, max_rows: int, num_pages: int | None = None) -> CpuEngine:
    checkpoint = open_checkpoint(str(folder), cache_dir=folder / "cache", progress=print)
    pages = num_pages or max_rows * MAX_CONTEXT // PAGE_SIZE
    config = CpuEngineConfig(
        page_size=PAGE_SIZE, num_pages=pages, max_rows=max_rows, max_context=MAX_CONTEXT, threads=1
    )
    return open_cpu_engine(checkpoint, config, dtype=torch.float32, progress=print)
