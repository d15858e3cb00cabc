# SPDX-License-Identifier: Apache-2.0
"""DistributedDataParallel trains what torchq.prepare_qat made: all ranks have one model."""

from __future__ import annotations

from pathlib import Path

import fresh
import pytest
import torch
import torch.distributed as dist

PROGRAM = r"""
import os, sys
rank = int(os.fork() == 0)  # before autograd starts its threads
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
import torchq

learn = bool(int(os.environ["LEARN"]))
torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(),
                      nn.Linear(288, 4))
images = torch.randn(2, 32, 1, 8, 8)
labels = (images.mean((2, 3, 4)) > 0).long()
qat = torchq.prepare_qat(model, images[0], learn_scales=learn)
dist.init_process_group("gloo", f"file://{os.getcwd()}/store", world_size=2, rank=rank)
ddp = DistributedDataParallel(qat)
optimizer = torch.optim.SGD(ddp.parameters(), 0.02, momentum=0.9)
losses = []
for _ in range(12):
    loss = nn.functional.cross_entropy(ddp(images[rank]), labels[rank])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
with torch.no_grad():
    ddp(images[rank])  # brings the buffers of rank 0
qat.eval()
converted = torchq.convert(ddp.module, strict=True)
result = {"state": qat.state_dict(), "int8": converted(images[0]), "rounded": qat(images[0]),
          "losses": losses}
torch.save(result, f"{rank}.pt")
dist.barrier()
dist.destroy_process_group()
if rank:
    os._exit(0)
os.wait()
"""


@pytest.mark.slow
@pytest.mark.skipif(not dist.is_gloo_available(), reason="torch without gloo")
@pytest.mark.parametrize("learn", [False, True])
def test_ranks_train_one_model(
    learn: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = fresh.python(f"import os; os.chdir({str(tmp_path)!r})\n{PROGRAM}", LEARN=str(int(learn)))
    assert done.returncode == 0, done.stderr
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    for name, value in first["state"].items():
        # the last call moves ranges and statistics by the data of each rank
        moved = any(part in name for part in ("running_", "_value", "num_batches"))
        assert moved or torch.equal(value, second["state"][name]), name
    for result in (first, second):
        assert result["losses"][-1] < result["losses"][0]
        assert result["losses"] != (second if result is first else first)["losses"]
        torch.testing.assert_close(result["int8"], result["rounded"], atol=1e-4, rtol=1e-4)
