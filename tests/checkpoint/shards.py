"""Two processes train a tiny model in shards (FSDP2) and save it as Accelerate does: `python shards.py OUT`.

They are forked once all is imported, which takes most of the time.
"""

import os
import sys

import torch
import torch.distributed
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

TOKENS = torch.arange(32).reshape(2, 16)


def train(out: str, rank: int) -> None:
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    torch.distributed.init_process_group("gloo", init_method=f"file://{out}/meeting", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=50,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    )
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    assert isinstance(model.lm_head.weight, DTensor)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(input_ids=TOKENS, labels=TOKENS).loss.backward()
    optimizer.step()
    weights = get_model_state_dict(model)
    dcp.save({"model": weights}, checkpoint_id=f"{out}/checkpoint/pytorch_model_fsdp_0")
    state = get_optimizer_state_dict(model, optimizer)
    dcp.save({"optimizer": state}, checkpoint_id=f"{out}/checkpoint/optimizer_0")
    with torch.no_grad():
        logits = model(input_ids=TOKENS).logits
    gathered = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        model.config.save_pretrained(f"{out}/checkpoint")
        save_file(gathered, f"{out}/gathered.safetensors")
        save_file({"logits": logits}, f"{out}/logits.safetensors")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    if other := os.fork():
        train(sys.argv[1], 0)
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]))
    train(sys.argv[1], 1)
