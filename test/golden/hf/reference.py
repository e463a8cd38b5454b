"""Makes and checks the golden models of this folder: Llama, Qwen2 and Qwen3 in float64 with numpy, independent of Trefoil.

usage: python3 reference.py check FOLDER...   compares golden.safetensors with what this program computes; prints the errors
       python3 reference.py make FOLDER       writes the models llama, qwen2 and qwen3 with their golden.safetensors
"""

import json
import math
import sys
from pathlib import Path

import numpy as np

COUNTS = (1, 7, 33, 130)  # tokens of the inputs
KEPT = np.linspace(0, 129, 12).astype(int)  # positions of the longest input whose logits are stored
GREEDY = 16
TYPES = {"F32": np.float32, "F16": np.float16, "I32": np.int32}

COMMON = {"vocab_size": 48, "hidden_size": 32, "num_hidden_layers": 2, "hidden_act": "silu",
          "max_position_embeddings": 2048, "bos_token_id": 0, "eos_token_id": [46, 47]}
# Name: what config.json says, the type of the weights on disk, the number of files.
MODELS = {
    "llama": ({**COMMON, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "intermediate_size": 36,
               "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-5,
               "tie_word_embeddings": False, "torch_dtype": "bfloat16", "rope_theta": 500000.0,
               "rope_scaling": {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                                "original_max_position_embeddings": 64}}, "BF16", 1),
    "qwen2": ({**COMMON, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "intermediate_size": 24,
               "num_attention_heads": 2, "num_key_value_heads": 1, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
               "torch_dtype": "float32", "rope_theta": 1000000.0, "sliding_window": 131072,
               "use_sliding_window": False,
               "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}}, "F32", 1),
    "qwen3": ({**COMMON, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "intermediate_size": 24,
               "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "rms_norm_eps": 1e-6,
               "attention_bias": False, "tie_word_embeddings": True, "dtype": "bfloat16",
               "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}}, "BF16", 2),
}


def inverse_frequencies(config, size):
    """Inverse frequencies of rotary positions [size / 2], and the factor on cosine and sine."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = rope.get("rope_theta", config.get("rope_theta"))
    pair = np.arange(size // 2)
    frequencies = theta ** (-2.0 * pair / size)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return frequencies, 1.0
    factor, original = rope["factor"], rope["original_max_position_embeddings"]
    if kind == "llama3":
        turns = original * frequencies / (2 * np.pi)
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        kept = np.clip((turns - low) / (high - low), 0, 1)
    elif kind == "yarn":
        def pair_of(turns):
            return size * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))
        first = max(math.floor(pair_of(rope.get("beta_fast", 32))), 0)
        last = min(math.ceil(pair_of(rope.get("beta_slow", 1))), size - 1)
        kept = 1 - np.clip((pair - first) / max(last - first, 0.001), 0, 1)
    else:
        raise ValueError(f"rope type {kind} is not supported")
    amplitude = 0.1 * math.log(factor) + 1 if kind == "yarn" else 1.0
    return kept * frequencies + (1 - kept) * frequencies / factor, amplitude


def forward(config, weights, ids):
    """Logits [T, vocabulary], and the hidden states before every layer, after the last one, and after the last norm."""
    heads, groups, eps = config["num_attention_heads"], config["num_key_value_heads"], config["rms_norm_eps"]
    size = config.get("head_dim", config["hidden_size"] // heads)
    count = len(ids)
    frequencies, amplitude = inverse_frequencies(config, size)
    angles = np.arange(count)[:, None, None] * frequencies
    cosine, sine = amplitude * np.cos(angles), amplitude * np.sin(angles)
    future = np.triu(np.full((count, count), -np.inf), 1)

    def norm(x, name):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weights[f"{name}.weight"]

    def linear(x, name):
        return x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", 0.0)

    def rotate(x):
        a, b = np.split(x, 2, axis=-1)
        return np.concatenate([a * cosine - b * sine, b * cosine + a * sine], axis=-1)

    x = weights["model.embed_tokens.weight"][ids]
    hidden = [x]
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        y = norm(x, f"{prefix}.input_layernorm")
        q, k, v = (linear(y, f"{prefix}.self_attn.{name}_proj").reshape(count, -1, size) for name in "qkv")
        if f"{prefix}.self_attn.q_norm.weight" in weights:
            q, k = norm(q, f"{prefix}.self_attn.q_norm"), norm(k, f"{prefix}.self_attn.k_norm")
        group = np.arange(heads) // (heads // groups)
        scores = np.einsum("thd,shd->hts", rotate(q), rotate(k)[:, group]) / math.sqrt(size) + future
        powers = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = np.einsum("hts,shd->thd", powers / powers.sum(-1, keepdims=True), v[:, group])
        x = x + linear(mixed.reshape(count, heads * size), f"{prefix}.self_attn.o_proj")
        y = norm(x, f"{prefix}.post_attention_layernorm")
        gate = linear(y, f"{prefix}.mlp.gate_proj")
        x = x + linear(gate / (1 + np.exp(-gate)) * linear(y, f"{prefix}.mlp.up_proj"), f"{prefix}.mlp.down_proj")
        hidden.append(x)
    x = norm(x, "model.norm")
    return x @ weights.get("lm_head.weight", weights["model.embed_tokens.weight"]).T, [*hidden, x]


def golden_of(config, weights, inputs, kept):
    """The tensors of golden.safetensors, and the smallest margin by which a greedy token won."""
    tensors, margin = {}, math.inf
    for ids in inputs:
        count = len(ids)
        logits, hidden = forward(config, weights, ids)
        tensors[f"input_ids_{count}"] = np.int32(ids)
        tensors[f"logits_{count}"] = logits[kept] if count == 130 else logits
        if count == 130:
            tensors["positions_130"] = np.int32(kept)
        if count == 7:
            names = [*range(len(hidden) - 1), "final"]
            tensors.update((f"hidden_7.{name}", state) for name, state in zip(names, hidden))
        if count == 33:
            text = list(ids)
            for _ in range(GREEDY):
                last = forward(config, weights, text)[0][-1]
                best = np.sort(last)[-2:]
                margin = min(margin, best[1] - best[0])
                text.append(int(last.argmax()))
            tensors["greedy_33"] = np.int32(text[count:])
    return tensors, margin


def random_weights(config, kind, rng):
    """Weights that make attention far from uniform and logits of about 10, rounded to the type on disk."""
    hidden, inner, vocabulary = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    size = config.get("head_dim", hidden // config["num_attention_heads"])
    q, kv = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    weights = {"model.embed_tokens.weight": rng.normal(size=(vocabulary, hidden)) * 0.05}
    last_norm = 60 / math.sqrt(hidden)
    if not config["tie_word_embeddings"]:
        weights["lm_head.weight"] = rng.normal(size=(vocabulary, hidden)) * 3 / math.sqrt(hidden)
        last_norm = 1.0
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        shapes = {"self_attn.q_proj": (q, hidden), "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden),
                  "self_attn.o_proj": (hidden, q), "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
                  "mlp.down_proj": (hidden, inner)}
        for name, shape in shapes.items():
            gain = 1.6 if name[-6] in "qk" else 0.7
            weights[f"{prefix}.{name}.weight"] = rng.normal(size=shape) * gain / math.sqrt(shape[1])
            if config["model_type"] == "qwen2" and name[-6] in "qkv":
                weights[f"{prefix}.{name}.bias"] = rng.normal(size=shape[0]) * 0.5
        norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
        if config["model_type"] == "qwen3":
            norms.update({"self_attn.q_norm": size, "self_attn.k_norm": size})
        for name, length in norms.items():
            weights[f"{prefix}.{name}.weight"] = 1 + 0.25 * rng.normal(size=length)
    weights["model.norm.weight"] = last_norm * (1 + 0.25 * rng.normal(size=hidden))
    return {name: decode(*encode(values, kind)) for name, values in sorted(weights.items())}


def encode(values, kind):
    """The bytes of an array in a type of safetensors; bfloat16 is rounded to nearest even."""
    if kind != "BF16":
        return values.astype(TYPES[kind]).tobytes(), kind, values.shape
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16).tobytes(), kind, values.shape


def decode(data, kind, shape):
    if kind == "BF16":
        values = (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32)
    else:
        values = np.frombuffer(data, TYPES[kind])
    return values.astype(np.int64 if kind == "I32" else np.float64).reshape(shape)


def write_safetensors(path, tensors, kind):
    header, blocks, offset = {"__metadata__": {"format": "pt"}}, [], 0
    for name, values in tensors.items():
        data, dtype, shape = encode(values, "I32" if values.dtype == np.int32 else kind)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + len(data)]}
        blocks.append(data)
        offset += len(data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(blocks))


def read_safetensors(path):
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    tensors = {}
    for name, entry in json.loads(data[8:start]).items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            tensors[name] = decode(data[start + begin : start + end], entry["dtype"], entry["shape"])
    return tensors


def make(folder):
    for name, (config, kind, files) in MODELS.items():
        margin, seed = 0, 0
        while margin < 0.15:  # no greedy token may win by less than what float32 rounds
            seed += 1
            rng = np.random.default_rng(seed)
            weights = random_weights(config, kind, rng)
            inputs = [rng.integers(0, 46, size=count) for count in COUNTS]
            golden, margin = golden_of(config, weights, inputs, KEPT)
        path = folder / name
        path.mkdir(parents=True, exist_ok=True)
        (path / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        write_safetensors(path / "golden.safetensors", golden, "F32")
        write_weights(path, weights, kind, files)
        print(f"{name}: seed {seed}, greedy tokens lead by at least {margin:.2f}")


def write_weights(path, weights, kind, files):
    names = list(weights)
    parts = [names[i * len(names) // files : (i + 1) * len(names) // files] for i in range(files)]
    shards = ["model.safetensors"] if files == 1 else [f"model-{i + 1:05}-of-{files:05}.safetensors" for i in range(files)]
    for shard, part in zip(shards, parts):
        write_safetensors(path / shard, {name: weights[name] for name in part}, kind)
    if files > 1:
        places = {name: shard for shard, part in zip(shards, parts) for name in part}
        index = {"metadata": {}, "weight_map": places}
        (path / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def check(folder):
    config = json.loads((folder / "config.json").read_text())
    weights = {}
    for path in sorted(folder.glob("model*.safetensors")):
        weights.update(read_safetensors(path))
    stored = read_safetensors(folder / "golden.safetensors")
    inputs = [stored[f"input_ids_{count}"] for count in COUNTS]
    computed, _ = golden_of(config, weights, inputs, stored["positions_130"])
    if not np.array_equal(stored["greedy_33"], computed["greedy_33"]):
        sys.exit(f"{folder}: other greedy tokens")
    for kind in ("logits", "hidden"):
        error = max(np.abs(stored[name] - computed[name]).max() for name in computed if name.startswith(kind))
        print(f"{folder}: {kind} differ by at most {error:.1e}")


if __name__ == "__main__":
    mode, *folders = sys.argv[1:]
    for path in folders:
        {"make": make, "check": check}[mode](Path(path))
