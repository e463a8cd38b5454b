"""Writes adapter/: a LoRA adapter of llama/ by PEFT, and the logits of PEFT's model with it and without.

    python adapter.py        (peft 0.21.0, transformers 5.18.0, torch 2.13.0)
"""

import json
import os

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

here = os.path.dirname(os.path.abspath(__file__))
folder = os.path.join(here, "adapter")


def load_base():
    path = os.path.join(here, "llama")
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()


config = LoraConfig(
    r=2,
    lora_alpha=5,
    use_rslora=True,
    task_type="CAUSAL_LM",
    target_modules=["q_proj", "v_proj", "o_proj", "down_proj", "lm_head"],
    rank_pattern={r"layers\.0\..*q_proj": 3},
    alpha_pattern={"v_proj|o_proj": 7},
)
model = get_peft_model(load_base(), config)
torch.manual_seed(3)
with torch.no_grad():
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.copy_(torch.randn_like(parameter) * 0.2)
model.save_pretrained(folder)
os.remove(os.path.join(folder, "README.md"))
path = os.path.join(folder, "adapter_config.json")
with open(path) as file:
    saved = json.load(file)
with open(path, "w") as file:
    json.dump({**saved, "base_model_name_or_path": "golden/llama"}, file, indent=2)

model = PeftModel.from_pretrained(load_base(), folder).eval()
ids = torch.randint(0, model.config.vocab_size, (40,))
with torch.no_grad():
    adapted = model(ids[None]).logits[0]
    with model.disable_adapter():
        plain = model(ids[None]).logits[0]
tensors = {"input_ids": ids.to(torch.int32), "logits": adapted[-8:].contiguous(), "plain": plain[-8:].contiguous()}
save_file(tensors, os.path.join(folder, "golden.safetensors"))
