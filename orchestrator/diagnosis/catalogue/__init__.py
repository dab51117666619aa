"""The catalogue: one entry a cause, as data. `rules` reads it; docs/diagnosis.md is generated from it."""

from __future__ import annotations

from orchestrator.diagnosis.catalogue import (
    attention,
    compiling,
    distributed,
    gpu,
    memory,
    network,
    place,
    software,
    storage,
    training,
)
from orchestrator.diagnosis.model import Cause

THEMES = {
    "attention": "Attention",
    "compiling": "Compiling",
    "memory": "Memory",
    "gpu": "GPU and driver",
    "distributed": "Several processes",
    "storage": "Disks, files, data",
    "software": "Program and environment",
    "network": "Network",
    "training": "Training",
    "place": "Place",
}

CAUSES: tuple[Cause, ...] = (
    *attention.CAUSES,
    *compiling.CAUSES,
    *memory.CAUSES,
    *gpu.CAUSES,
    *distributed.CAUSES,
    *storage.CAUSES,
    *software.CAUSES,
    *network.CAUSES,
    *training.CAUSES,
    *place.CAUSES,
)

BY_ID = {cause.id: cause for cause in CAUSES}
