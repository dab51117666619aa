"""Muon or AdamW for matrices, AdamW for the rest, on float32 masters of the weights.

Gradients arrive as sums, unnormalised: the weight of the whole step (over micro-batches and ranks) is known only when
all of it has run, and is divided out once, here.

Muon (Keller Jordan): momentum, then the nearest orthogonal matrix by a Newton-Schulz iteration, so that every
direction of a matrix moves at the same rate.
"""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from trainer.config import OptimizerConfig
from trainer.schedule import factor


def orthogonalise(matrix: Tensor, iterations: int = 5) -> Tensor:
    """[m, n] -> a matrix with the same singular vectors and singular values near 1 (about 0.7 to 1.2).

    Each iteration multiplies by a polynomial of the Gram matrix. They commute, so all of them are multiplied up in
    the [m, m] of the shorter side, and the long side is met twice only. On a CPU the arithmetic is all that it takes,
    even at a width of 192: stacking matrices for batched products was no faster.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / (x.norm() + 1e-7)
    gram = x @ x.T
    product = None  # of the polynomials so far
    for left in reversed(range(iterations)):
        polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        polynomial.diagonal().add_(a)
        product = polynomial if product is None else polynomial @ product
        if left:
            gram = polynomial @ gram @ polynomial
    x = product @ x
    return x.T if tall else x


class Optimizer:
    """Owns the master weights: the module's parameters themselves where they are float32 or wider, else copies that
    the parameters follow. Gradients of lesser precision are added up in the masters' precision as they appear."""

    def __init__(self, module: nn.Module, config: OptimizerConfig, steps: int):
        self.config, self.steps = config, steps
        self.parameters = dict(module.named_parameters())
        self.masters: dict[str, Tensor] = {}
        for name, parameter in self.parameters.items():
            narrow = parameter.dtype in (torch.bfloat16, torch.float16)
            self.masters[name] = parameter.detach().float().clone() if narrow else parameter
            if narrow:
                parameter.register_post_accumulate_grad_hook(self._gather(self.masters[name]))
        matrices = [name for name, p in self.parameters.items() if p.ndim == 2 and config.kind == "muon"]
        self.momentum = {name: torch.zeros_like(self.masters[name]) for name in matrices}
        others = [master for name, master in self.masters.items() if name not in self.momentum]
        groups = [  # gains of norms do not decay
            {"params": [master for master in others if master.ndim >= 2], "weight_decay": config.weight_decay},
            {"params": [master for master in others if master.ndim < 2], "weight_decay": 0.0},
        ]
        self.adam = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=0.0,
            betas=(config.beta1, config.beta2),
            fused=others[0].device.type == "cuda" or None,
        )
        self.average = {name: m.detach().clone() for name, m in self.masters.items()} if config.ema else {}

    @staticmethod
    def _gather(master: Tensor):
        def hook(parameter: Tensor) -> None:
            if master.grad is None:
                master.grad = parameter.grad.to(master.dtype)
            else:
                master.grad.add_(parameter.grad)
            parameter.grad = None

        return hook

    def gradients(self) -> list[Tensor]:
        """Of the masters, in their order; zero where a parameter took no part."""
        for master in self.masters.values():
            if master.grad is None:
                master.grad = torch.zeros_like(master)
        return [master.grad for master in self.masters.values()]

    def clear(self) -> None:
        for master in self.masters.values():
            master.grad = None

    @torch.no_grad()
    def gradient_norm(self, weight: Tensor) -> Tensor:
        """Divides the gradients by the step's weight, a scalar; -> their global norm."""
        gradients = self.gradients()
        torch._foreach_mul_(gradients, 1 / weight.clamp(min=torch.finfo(torch.float32).tiny).to(gradients[0].dtype))
        return torch.stack(torch._foreach_norm(gradients)).norm()

    @torch.no_grad()
    def apply(self, step: int, norm: Tensor) -> float:
        """Clips by the global norm, updates and clears the gradients; -> the learning rate of the matrices."""
        config = self.config
        share = factor(step, self.steps, config)
        if config.clip:
            scale = (config.clip / (norm + 1e-6)).clamp(max=1.0)
            torch._foreach_mul_([master.grad for master in self.masters.values()], scale)
        for name, buffer in self.momentum.items():
            master = self.masters[name]
            buffer.lerp_(master.grad, 1 - config.momentum)
            update = orthogonalise(master.grad.lerp(buffer, config.momentum))
            rows, columns = master.shape
            rate = config.muon_rate * share
            master.mul_(1 - rate * config.weight_decay)
            master.add_(update, alpha=-rate * max(1.0, rows / columns) ** 0.5)
        for group in self.adam.param_groups:
            group["lr"] = config.adam_rate * share
        self.adam.step()
        for name, master in self.masters.items():
            master.grad = None
            if master is not self.parameters[name]:
                self.parameters[name].copy_(master)
            if self.average:
                self.average[name].lerp_(master, 1 - config.ema)
        return (config.muon_rate if self.momentum else config.adam_rate) * share

    def _adam_state(self) -> dict[str, dict[str, Tensor]]:
        """By name; made before the first step, so that a fresh optimizer can be loaded into."""
        states = {}
        for name, master in self.masters.items():
            if name in self.momentum:
                continue
            state = self.adam.state[master]
            if not state:
                state["step"] = torch.tensor(0.0, device=master.device if master.device.type == "cuda" else "cpu")
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(master), torch.zeros_like(master)
            states[name] = state
        return states

    def tensors(self) -> dict[str, Tensor]:
        """All state by flat names, views of the real thing: `model.*` are the masters."""
        flat = {f"model.{name}": master.detach() for name, master in self.masters.items()}
        flat |= {f"average.{name}": tensor for name, tensor in self.average.items()}
        flat |= {f"momentum.{name}": tensor for name, tensor in self.momentum.items()}
        for name, state in self._adam_state().items():
            flat |= {f"adam.{key}.{name}": tensor for key, tensor in state.items()}
        return flat

    @torch.no_grad()
    def loaded(self) -> None:
        """The masters were overwritten from outside: let the parameters follow."""
        for name, master in self.masters.items():
            if master is not self.parameters[name]:
                self.parameters[name].copy_(master)

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """The module computes with the moving average, where there is one, and gets its own weights back."""
        own = {name: parameter.detach().clone() for name, parameter in self.parameters.items()} if self.average else {}
        with torch.no_grad():
            for name in own:
                self.parameters[name].copy_(self.average[name])
        try:
            yield
        finally:
            with torch.no_grad():
                for name, weights in own.items():
                    self.parameters[name].copy_(weights)
