"""A vision transformer of somebody's own, under the plan's layout by two lines, which reports."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from fsdpplan.trainer import clip_grad_norm, gradient_sync, load_plan, parallelize, report_step

HIDDEN, PATCHES, CLASSES = 64, 16, 10


class Vit(nn.Module):
    """Patches of an image, blocks over all of them, and a class by their mean."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, HIDDEN, kernel_size=4, stride=4)
        self.places = nn.Parameter(torch.zeros(1, PATCHES, HIDDEN))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(HIDDEN, 4, 128, dropout=0.0, batch_first=True)
            for _ in range(4)
        )
        self.head = nn.Linear(HIDDEN, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2) + self.places
        for block in self.blocks:
            x = block(x)
        scores: Tensor = self.head(x.mean(dim=1))
        return scores


torch.manual_seed(0)
plan = load_plan()
model = parallelize(Vit(), plan)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
layout = plan.layout
generator = torch.Generator().manual_seed(dist.get_rank())
images = torch.randn(layout.micro_batch, 3, 16, 16, generator=generator)
classes = torch.randint(CLASSES, (layout.micro_batch,), generator=generator)
for _ in range(12):
    for index in range(layout.num_microbatches):
        with gradient_sync(model, layout, is_last=index == layout.num_microbatches - 1):
            loss = F.cross_entropy(model(images), classes)
            (loss / layout.num_microbatches).backward()
    clip_grad_norm(model, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    report_step(loss=loss, tokens=layout.num_microbatches * layout.micro_batch * PATCHES)
dist.destroy_process_group()
