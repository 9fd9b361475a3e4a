"""Architecture name -> model."""

from collections.abc import Callable

from worker.models.decoder import Decoder
from worker.models.layers import Build
from worker.models.llama import llama_for_causal_lm
from worker.models.qwen2 import qwen2_for_causal_lm
from worker.models.qwen3 import qwen3_for_causal_lm

_MODELS: dict[str, Callable[[Build], Decoder]] = {
    "LlamaForCausalLM": llama_for_causal_lm,
    "MistralForCausalLM": llama_for_causal_lm,
    "Qwen2ForCausalLM": qwen2_for_causal_lm,
    "Qwen3ForCausalLM": qwen3_for_causal_lm,
}


def build_model(build: Build) -> Decoder:
    """The model of a config, its weights not yet filled.

    The architecture is one that `ModelConfig.from_hf` has let through.
    """
    return _MODELS[build.config.architecture](build)
