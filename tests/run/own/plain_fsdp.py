"""A plain FSDP2 script, which has nothing of a plan but that it reports its steps."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fsdpplan.trainer import report_step

HIDDEN, LENGTH, VOCAB, ROWS = 64, 16, 64, 8


class Decoder(nn.Module):
    """Blocks between a table and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCAB, HIDDEN)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(HIDDEN, 4, 128, dropout=0.0, batch_first=True)
            for _ in range(4)
        )
        self.head = nn.Linear(HIDDEN, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


dist.init_process_group("gloo")
torch.manual_seed(0)
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
model = Decoder()
for block in model.blocks:
    fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
generator = torch.Generator().manual_seed(dist.get_rank())
rows = torch.randint(VOCAB, (ROWS, LENGTH + 1), generator=generator)
for _ in range(12):
    loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    report_step(loss=loss, tokens=ROWS * LENGTH)
dist.destroy_process_group()
