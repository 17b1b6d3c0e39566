"""A script as people write it for `accelerate launch`: it knows nothing of Sconce.

    sconce launch --cpu -n 2 xtask/peers/train_gloo.py --losses losses.txt

Ranks meet by torch.distributed (gloo), train a linear model on their shares of the data, and must end with equal weights and
a smaller loss. With --fail RANK that rank raises in the first round: torch's `record` leaves the error for the launcher.
Needs torch.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record


def data(rank: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(64, 4, generator=generator)
    targets = inputs @ torch.tensor([[1.0], [-2.0], [0.5], [3.0]]) + 0.25
    return inputs[rank::size], targets[rank::size]


@record
def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--losses", help="file in which rank 0 writes its losses")
    parser.add_argument("--fail", type=int, help="rank that raises in the first round")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    assert size == int(os.environ["WORLD_SIZE"]) and rank == int(os.environ["RANK"])
    if rank == arguments.fail and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        raise ValueError("no data for this rank")
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs, targets = data(rank, size)
    losses = []
    for _ in range(50):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / size)
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    of_all = [torch.empty_like(weights) for _ in range(size)]
    dist.all_gather(of_all, weights)
    assert all(torch.equal(of_all[0], other) for other in of_all), "the ranks' weights differ"
    assert losses[-1] < losses[0] / 100, losses
    if rank == 0:
        print(f"trained on {size} ranks: loss {losses[0]:.4f} to {losses[-1]:.6f}")
        if arguments.losses:
            with open(arguments.losses, "w") as file:
                file.write("\n".join(repr(loss) for loss in losses))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
