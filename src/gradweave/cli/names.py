"""Names listed in help texts, repeated here since importing their definitions loads torch; tests compare both."""

from __future__ import annotations

MODELS = ("mlp", "autoencoder", "mobilenet_v2", "resnet18", "gpt_small", "gpt2")
OPTIMIZERS = ("sgd", "adam", "adamw", "adagrad", "rmsprop", "adadelta", "nadam")
MODES = (
    "loop", "foreach", "fused", "hook", "backward", "forward", "auto", "reorder", "daso", "data_parallel", "compile",
    "pipeline", "eva", "eva_f", "eva_s",
)  # fmt: skip
DTYPES = ("float32", "bfloat16", "float16")
