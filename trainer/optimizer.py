"""Muon or AdamW for matrices, AdamW for the rest, on float32 masters of the weights.

Gradients arrive as sums, unnormalised: the weight of the whole step (over micro-batches and ranks) is known only when
all of it has run, and is divided out once, here.

Of a sharded drafter (sharding.py) all of this is of the rows that this rank holds; only the global norm and Muon's
iteration, which is of whole matrices, take the other ranks.

Muon (Keller Jordan): momentum, then the nearest orthogonal matrix by a Newton-Schulz iteration, so that every
direction of a matrix moves at the same rate.
"""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from trainer.config import OptimizerConfig
from trainer.drafter import Drafter
from trainer.schedule import factor
from trainer.sharding import Shards, own_rows


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

    def __init__(self, module: nn.Module, config: OptimizerConfig, steps: int, shards: Shards | None = None):
        """`shards`: what `sharding.shard` made of the module, which is at rest in the masters' precision then."""
        self.config, self.steps, self.shards = config, steps, shards
        self.parameters = dict(module.named_parameters())
        self.shapes = shards.shapes if shards else {name: p.shape for name, p in self.parameters.items()}
        self.masters: dict[str, Tensor] = {}
        for name, parameter in self.parameters.items():
            if shards:
                self.masters[name] = own_rows(parameter)
                continue
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
        for name, master in self.masters.items():
            parameter = self.parameters[name]
            if self.shards and parameter.grad is not None:
                master.grad, parameter.grad = own_rows(parameter.grad), None
            if master.grad is None:
                master.grad = torch.zeros_like(master)
        return [master.grad for master in self.masters.values()]

    def unsummed_gradients(self) -> list[Tensor]:
        """Those that are still to be added up over ranks: none, where the backward pass has done it."""
        return [] if self.shards else self.gradients()

    def clear(self) -> None:
        for name, master in self.masters.items():
            master.grad = self.parameters[name].grad = None

    @torch.no_grad()
    def gradient_norm(self, weight: Tensor) -> Tensor:
        """Divides the gradients by the step's weight, a scalar; -> their global norm."""
        gradients = self.gradients()
        torch._foreach_mul_(gradients, 1 / weight.clamp(min=torch.finfo(torch.float32).tiny).to(gradients[0].dtype))
        norm = torch.stack(torch._foreach_norm(gradients)).norm()
        return self.shards.sum(norm.square()).sqrt() if self.shards else norm

    @torch.no_grad()
    def apply(self, step: int, norm: Tensor) -> float:
        """Clips by the global norm, updates and clears the gradients; -> the learning rate of the matrices."""
        config = self.config
        share = factor(step, self.steps, config)
        if config.clip:
            scale = (config.clip / (norm + 1e-6)).clamp(max=1.0)
            torch._foreach_mul_([master.grad for master in self.masters.values()], scale)
        for name, update in self._updates():
            master, (rows, columns) = self.masters[name], self.shapes[name]
            rate = config.muon_rate * share
            master.mul_(1 - rate * config.weight_decay)
            master.add_(update, alpha=-rate * max(1.0, rows / columns) ** 0.5)
        for group in self.adam.param_groups:
            group["lr"] = config.adam_rate * share
        self.adam.step()
        for name, master in self.masters.items():
            master.grad = None
            if self._follows(name):
                self.parameters[name].copy_(master)
            if self.average:
                self.average[name].lerp_(master, 1 - config.ema)
        return (config.muon_rate if self.momentum else config.adam_rate) * share

    def _updates(self) -> Iterator[tuple[str, Tensor]]:
        """Muon's, of the rows that are here; one after the other, since each takes a matrix's memory."""

        def nesterov(name: str) -> Tensor:
            gradient = self.masters[name].grad
            buffer = self.momentum[name].lerp_(gradient, 1 - self.config.momentum)
            return gradient.lerp(buffer, self.config.momentum)

        if self.shards:
            yield from self.shards.each_whole(list(self.momentum), nesterov, orthogonalise)
        else:
            for name in self.momentum:
                yield name, orthogonalise(nesterov(name))

    def _follows(self, name: str) -> bool:
        """Whether the module's parameter is a copy of its master, not the same memory."""
        return self.shards is None and self.masters[name] is not self.parameters[name]

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

    def _state(self) -> Iterator[tuple[str, str | None, Tensor]]:
        """All state: flat name, the parameter that it is laid out as (None: a counter), and a view of the real thing.
        `model.*` are the masters."""
        for kind, tensors in (("model", self.masters), ("average", self.average), ("momentum", self.momentum)):
            for name, tensor in tensors.items():
                yield f"{kind}.{name}", name, tensor.detach()
        for name, state in self._adam_state().items():
            for key, tensor in state.items():
                yield f"adam.{key}.{name}", name if tensor.ndim else None, tensor

    def tensors(self) -> dict[str, Tensor]:
        """All state that is here, by flat names."""
        return {flat: tensor for flat, _, tensor in self._state()}

    def blank(self) -> dict[str, Tensor]:
        """Whole tensors on the host, not filled, of all state of all ranks."""
        return {
            flat: torch.empty(self.shapes[name] if name else (), dtype=tensor.dtype)
            for flat, name, tensor in self._state()
        }

    def gathered(self) -> Iterator[tuple[str, Tensor | None]]:
        """All state, whole: at a sharded drafter's leader one after the other, and None at the others, who must come
        along to the end."""
        for flat, name, tensor in self._state():
            yield flat, self.shards.gather(name, tensor) if self.shards and name else tensor

    @torch.no_grad()
    def scatter(self, whole: dict[str, Tensor] | None) -> None:
        """The leader's whole tensors, to the ranks that have their rows."""
        for flat, name, tensor in self._state():
            if name:
                self.shards.scatter(name, tensor, whole[flat] if whole else None)
            else:
                if whole:
                    tensor.copy_(whole[flat])
                self.shards.broadcast(tensor)

    @torch.no_grad()
    def loaded(self) -> None:
        """The masters were overwritten from outside: let the parameters follow."""
        for name, master in self.masters.items():
            if self._follows(name):
                self.parameters[name].copy_(master)

    @torch.no_grad()
    def gather_into(self, drafter: Drafter | None) -> None:
        """A sharded drafter's weights for measuring, the moving average where there is one, into one that is whole, at
        the leader; called by all ranks."""
        parameters = dict(drafter.named_parameters()) if drafter else {}
        for name, tensor in (self.average or self.masters).items():
            whole = self.shards.gather(name, tensor)
            if whole is not None:
                parameters[name].copy_(whole)

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
