"""Compare one process with the custom GPT whose attention is that of exercises/solution/ring.py.

Each rank gets its tokens, their positions in the whole text, and labels that are shifted before the text is cut.
test_exercises.py starts this program as several ranks.
"""

import sys

sys.path.insert(0, "scripts")
sys.path.insert(0, "exercises/solution")

import torch
import torch.distributed as dist
from ring import Ring, RingAttention
from torch.nn import functional as F

from models.custom_model import CustomGPTConfig, CustomGPTForCausalLM

TOKENS = 2048


def loss_and_gradients(tokens: torch.Tensor, places: torch.Tensor, labels: torch.Tensor) -> list[torch.Tensor]:
    """Return these tokens' part of the loss, which is a mean over the labels of the whole text, and its gradients."""
    logits = model(tokens.mT, position_ids=places.mT).logits
    loss = F.cross_entropy(logits[0], labels[:, 0], reduction="sum") / (TOKENS - 1)
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]


torch.manual_seed(0)
config = CustomGPTConfig(vocab_size=512, hidden_size=64, num_layers=2, num_heads=4, ff_dim=256, seq_length=TOKENS)
model = CustomGPTForCausalLM(config)
for block in model.blocks:
    for layer in (block.attention.q, block.attention.k):
        layer.weight.data *= 10  # with the initial weights all scores are almost equal
tokens = torch.randint(config.vocab_size, (TOKENS, 1))
labels = torch.cat([tokens[1:], torch.full((1, 1), -100)])  # the last token has no next token
text = [tokens, torch.arange(TOKENS)[:, None], labels]
loss, *gradients = loss_and_gradients(*text)
largest = max(gradient.abs().max() for gradient in gradients)

dist.init_process_group("gloo")
for zigzag in (False, True):
    ring = Ring(dist.get_rank(), dist.get_world_size(), zigzag=zigzag)
    F.scaled_dot_product_attention = lambda q, k, v, **_: RingAttention.apply(q, k, v, ring)  # noqa: B023
    found = loss_and_gradients(*map(ring.own_part, text))
    for tensor in found:
        dist.all_reduce(tensor)
    differences = [(each - same).abs().max() for each, same in zip(found[1:], gradients, strict=True)]
    print(f"loss {abs(found[0] - loss) / loss:.1e} gradients {max(differences) / largest:.1e} sent {ring.sent}")
dist.destroy_process_group()
