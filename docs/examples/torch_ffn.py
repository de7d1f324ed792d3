"""A small mixture-of-experts layer of PyTorch whose experts moepool serves: on the first GPU, or on the CPU.

The router and the residual are PyTorch's. The experts are quantised to Q8_0 and lie in host memory, a quarter
of them at a time in slots on the device too.

    python torch_ffn.py
"""

from __future__ import annotations

import torch

import moepool


class MixtureOfExperts(torch.nn.Module):
    """Top-k experts of each token, added to it.

    Parameters
    ----------
    layer : moepool.Layer
        With the matrices gate, up and down.
    k : int
        Experts a token.
    device : str
        "cpu" or "cuda:N".
    """

    def __init__(self, layer: moepool.Layer, k: int, device: str) -> None:
        super().__init__()
        self.k = k
        self.router = torch.nn.Linear(
            layer.matrices["gate"].columns, layer.experts, bias=False, device=device
        )
        self.experts = moepool.ExpertFFN(moepool.Pool(layer, layer.experts // 4, device=device))

    # moepool computes no gradients, and says so to tensors that ask for them.
    @torch.inference_mode()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(T, hidden) to (T, hidden)."""
        weights, ids = torch.softmax(self.router(x), dim=-1).topk(self.k)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        # Tensors in, a tensor of the same device out, on PyTorch's current stream; on the CPU a NumPy array.
        return x + torch.as_tensor(self.experts(x, ids, weights))


def make_layer(experts: int, hidden: int, width: int) -> moepool.Layer:
    """Random experts, quantised."""
    shapes = {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
    weights = {name: torch.randn(experts, *shape) * shape[1] ** -0.5 for name, shape in shapes.items()}
    return moepool.ExpertStore.from_arrays(**weights, qtype="q8_0")[0]


def main() -> None:
    """Runs the layer on the CPU and, if there is one, on a GPU, and compares."""
    torch.manual_seed(0)
    layer = make_layer(experts=32, hidden=256, width=512)
    x = torch.randn(4, 256)
    on_cpu = MixtureOfExperts(layer, k=4, device="cpu")
    y = on_cpu(x)
    print("cpu:", tuple(y.shape), on_cpu.experts.pool.stats())
    if not torch.cuda.is_available():
        print("no GPU for PyTorch")
        return
    on_gpu = MixtureOfExperts(layer, k=4, device="cuda:0")
    on_gpu.router.load_state_dict(on_cpu.router.state_dict())
    z = on_gpu(x.to("cuda:0"))
    print("cuda:0:", tuple(z.shape), on_gpu.experts.pool.stats())
    # The router's product may round differently on the two; the experts' do not.
    print("largest difference:", float((y - z.cpu()).abs().max()))


if __name__ == "__main__":
    main()
