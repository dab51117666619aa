"""More than one rank: this process becomes torchrun, which starts them.

On several machines the launcher at each is told by ORCH_NODES, ORCH_NODE_RANK and ORCH_RENDEZVOUS (ADDRESS:PORT of
the first), and starts its share of the ranks: equal shares, or ORCH_RANKS, such as 5,3, by machine. Where machines are
missing and the run goes on without them, ORCH_NODES_WANTED says how many there should be, and the others speak of those
that are there.
"""

import os
import sys
from pathlib import Path

from trainer.errors import TrainerError
from trainer.topology import Topology

CGROUP = Path("/sys/fs/cgroup")  # of this container
SHUTDOWN = 600  # seconds that ranks have to save after SIGTERM, where nobody's patience is shorter; torchrun's is 30


def under_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ and "RANK" in os.environ


def ranks_present(world: int, environment: dict[str, str]) -> int:
    """How many of the ranks there are without the machines that are missing; 0 where none is. Raises TrainerError."""
    nodes, wanted = _number("ORCH_NODES", 1, environment), _number("ORCH_NODES_WANTED", 0, environment)
    if wanted <= nodes:
        return 0
    if "ORCH_RANKS" in environment:
        shares = [int(word) for word in environment["ORCH_RANKS"].split(",") if word.strip().isdigit()]
        if len(shares) == nodes:
            return sum(shares)
        raise TrainerError(f"ORCH_RANKS {environment['ORCH_RANKS']} names no share for each of {nodes} machines")
    if world % wanted:
        raise TrainerError(f"{world} ranks are no equal shares on {wanted} machines; set ORCH_RANKS, such as 5,3")
    return world // wanted * nodes


def own_ranks(world: int, environment: dict[str, str]) -> int:
    """How many of the ranks this machine starts. Raises TrainerError."""
    nodes, node = _number("ORCH_NODES", 1, environment), _number("ORCH_NODE_RANK", 0, environment)
    if nodes < 1 or node >= nodes:
        raise TrainerError(
            f"ORCH_NODES {nodes} and ORCH_NODE_RANK {node}: machines are numbered from 0, below their count"
        )
    if "ORCH_RANKS" in environment:
        words = environment["ORCH_RANKS"].split(",")
        shares = [int(word) for word in words if word.strip().isdigit()]
        if len(shares) != len(words) or len(shares) != nodes or sum(shares) != world or 0 in shares:
            raise TrainerError(
                f"ORCH_RANKS {environment['ORCH_RANKS']} does not deal {world} ranks out to {nodes} machines"
            )
        return shares[node]
    if world % nodes:
        raise TrainerError(f"{world} ranks are no equal shares on {nodes} machines; set ORCH_RANKS, such as 5,3")
    return world // nodes


def _number(name: str, default: int, environment: dict[str, str]) -> int:
    text = environment.get(name, str(default))
    if not text.isdigit():
        raise TrainerError(f"{name} must be a whole number, not `{text}`")
    return int(text)


def command(topology: Topology, arguments: list[str], environment: dict[str, str]) -> list[str]:
    """The words that start this machine's ranks, each of which runs `python -m trainer ARGUMENTS`."""
    nodes, node = environment.get("ORCH_NODES", "1"), environment.get("ORCH_NODE_RANK", "0")
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node"]
    words.append(str(own_ranks(topology.world, environment)))
    if nodes == "1":
        words.append("--standalone")
    else:
        address, colon, port = environment.get("ORCH_RENDEZVOUS", "").rpartition(":")
        if not colon or not address or not port.isdigit():
            raise TrainerError(f"{nodes} machines need ORCH_RENDEZVOUS, ADDRESS:PORT of the first one")
        words += ["--nnodes", nodes, "--node-rank", node, "--master-addr", address, "--master-port", port]
        words += ["--rdzv-id", environment.get("ORCH_RUN_ID", "run")]
    return [*words, "-m", "trainer", *arguments]


def environment_of_ranks(topology: Topology, environment: dict[str, str]) -> dict[str, str]:
    """What the ranks inherit: shares of the machine's cores, and time to save when they are asked to end."""
    share, ranks = cores_of_a_rank(topology, environment), own_ranks(topology.world, environment)
    return {
        "OMP_NUM_THREADS": str(share),
        "TORCHINDUCTOR_COMPILE_THREADS": str(compile_processes(share, ranks)),
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(SHUTDOWN),
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # a store that goes away is told with a stack of C++ frames otherwise
        **environment,
    }


def cores_of_a_rank(topology: Topology, environment: dict[str, str]) -> int:
    """Each rank's share of the cores that this process may use. Raises TrainerError."""
    return max(1, len(os.sched_getaffinity(0)) // own_ranks(topology.world, environment))


def threads_of_a_rank(wanted: int, topology: Topology, environment: dict[str, str]) -> int:
    """Of torch on the CPU, where the configuration says `wanted` (0: nothing); 0 leaves torch's own choice, which
    heeds OMP_NUM_THREADS. Raises TrainerError."""
    if wanted or topology.world == 1 or "OMP_NUM_THREADS" in environment:
        return wanted
    return cores_of_a_rank(topology, environment)


def compile_processes(cores: int, ranks: int = 1) -> int:
    """Of each rank. Compiling takes processes of about a gigabyte each: no more of them than the rank has cores, nor
    of all ranks together than half of the free memory holds."""
    free = memory_free()
    return max(1, min(cores, 32) if free is None else min(cores, 32, free // (2 << 30) // ranks))


def memory_free() -> int | None:
    """Bytes that this container may still take, or None where that is unknown."""
    try:
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        free = int(lines["MemAvailable"].split()[0]) << 10
    except (OSError, KeyError, ValueError):
        return None
    try:
        limit = (CGROUP / "memory.max").read_text().strip()
        if limit != "max":
            free = min(free, int(limit) - int((CGROUP / "memory.current").read_text()))
    except (OSError, ValueError):
        pass  # no limit that can be read
    return max(free, 0)


def become_torchrun(topology: Topology, arguments: list[str]) -> None:
    """Does not return. The process keeps its pid, so whoever started it watches torchrun itself."""
    environment = dict(os.environ)
    words = command(topology, arguments, environment)
    sys.stdout.flush()
    os.execve(words[0], words, environment_of_ranks(topology, environment))
