"""A whole 18-step run of ResNet-18 on 30 images of 224²: how much longer than its scoring passes alone?

python benchmarks/loop.py [--criterion lrp] [--device cpu]
"""

from __future__ import annotations

import argparse
import json
import time

import torch

from secateur.loop.prune import prune
from secateur.loop.settings import Schedule


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--criterion", default="lrp")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--images", type=int, default=30)
    options = parser.parse_args()
    import torchvision

    torch.manual_seed(0)
    net = getattr(torchvision.models, options.model)(num_classes=3).eval().to(options.device)
    data = torch.rand(options.images, 3, 224, 224, device=options.device), torch.arange(options.images) % 3
    prune(net, (data[0][:2], data[1][:2]), options.criterion, remove=0.05)  # what is slow only once
    schedule = Schedule(step=0.05, batch_size=options.images)
    begin = time.perf_counter()
    result = prune(net, data, options.criterion, remove=0.9, schedule=schedule)
    whole = time.perf_counter() - begin
    scoring = sum(row.score_seconds for row in result.history)
    print(json.dumps({
        "model": options.model, "criterion": options.criterion, "device": options.device,
        "steps": len(result.history) - 1, "seconds": round(whole, 2), "scoring_seconds": round(scoring, 2),
        "ratio": round(whole / scoring, 3), "threads": torch.get_num_threads(),
    }))  # fmt: skip


if __name__ == "__main__":
    main()
