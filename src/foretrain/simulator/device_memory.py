"""From live bytes to what a device has in use: three numbers that users see in three places.

allocated   live tensors and workspaces   torch.cuda.max_memory_allocated
reserved    what the allocator holds      torch.cuda.max_memory_reserved
used        with context and NCCL         nvidia-smi, and what runs out

See docs/explain/memory.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from foretrain.cost.calibration import load
from foretrain.hardware.device import Device
from foretrain.mesh import Mesh
from foretrain.program import CommEvent, Program, RankClass, Run
from foretrain.simulator.memory import Peak
from foretrain.simulator.result import MemoryResult
from foretrain.stack import Stack
from foretrain.units import GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """What one rank of a class uses at its peak, in bytes; `parts` add up to `used`."""

    parts: dict[str, float]
    allocated: float
    reserved: float

    @property
    def used(self) -> float:
        """Returns what a monitoring tool shows of the device."""
        return sum(self.parts.values())


#: An allocator that meets the end of the device gives whole free blocks back up to this share.
FULL_SHARE = 0.97


def device_memory(
    program: Program, index: int, peak: Peak, stack: Stack, device: Device
) -> DeviceMemory:
    """Returns the memory of a rank of class `index` whose live bytes are highest at `peak`.

    Free blocks that the allocator can give back count as far as the device reaches: before
    an allocation fails it returns all of them, so they never decide whether a run fits. Holes
    between live tensors lie in blocks that are in use and stay.
    """
    workspace = stack.workspace_gib * GIB
    allocated = peak.total + workspace
    spare = _spare(program, index, peak, stack, allocated)
    inside = {
        **peak.parts,
        "workspaces": workspace,
        "fragmentation": _between(program.classes[index], peak, stack, allocated),
        "flat step buffers": 0.0 if peak.in_step else program.classes[index].flat_step_bytes,
    }
    outside = {
        "communicators": stack.communicator_gib * GIB * process_groups(program.mesh),
        "context": _context_gib(stack, device) * GIB,
    }
    room = FULL_SHARE * device.memory_bytes - sum(inside.values()) - sum(outside.values())
    inside["fragmentation"] += min(spare, max(room, 0.0))
    return DeviceMemory(
        parts={part: value for part, value in {**inside, **outside}.items() if value},
        allocated=allocated,
        reserved=sum(inside.values()),
    )


def _context_gib(stack: Stack, device: Device) -> float:
    """The stack's, unless no version of it that runs on the device loads all kernels at start."""
    rules = load("step")
    if device.generation in rules["lazy_generations"]:
        return min(stack.context_gib, float(rules["lazy_context_gib"]))
    return stack.context_gib


def worst_memory(program: Program, memories: Sequence[DeviceMemory], peaks: Sequence[Peak],
                 device: Device) -> MemoryResult:  # fmt: skip
    """Returns the memory of the class that uses most."""
    worst = max(range(len(memories)), key=lambda i: memories[i].used)
    memory, rank_class = memories[worst], program.classes[worst]
    return MemoryResult(
        capacity_bytes=device.memory_bytes,
        usable_bytes=device.memory_bytes,
        peak_allocated_bytes=memory.allocated,
        peak_reserved_bytes=memory.reserved,
        device_used_bytes=memory.used,
        worst_rank=rank_class.ranks[0],
        moment=f"stage {rank_class.stage}, {peaks[worst].moment}",
        parts_bytes=memory.parts,
        band=float(load("step")["memory_band"]),
    )


def _between(rank_class: RankClass, peak: Peak, stack: Stack, allocated: float) -> float:
    """Bytes of holes between live tensors.

    A share of all live bytes, and a larger one of activations where those of several micro-batches
    are born and die between each other. With expandable segments the pages of a hole go where they
    are needed: only the rest of each tensor's last page is lost.
    """
    if stack.expandable_segments:
        return float(load("step")["expandable_holes"]) * allocated
    holes = stack.fragmentation * allocated
    if _alive(rank_class) > 1:
        holes += stack.pipeline_slack * peak.parts.get("activations", 0.0)
    return holes


def _spare(program: Program, index: int, peak: Peak, stack: Stack, allocated: float) -> float:
    """Bytes of free blocks: buffers of gathered units that differ in size, gathered activations."""
    spare = _waiting(program, index, stack)
    if "gathered weights" in peak.parts:
        spare += stack.gather_slack * allocated
    return spare


def _waiting(program: Program, index: int, stack: Stack) -> float:
    """Bytes of freed buffers of whole activations that a forward does not use again.

    A block that a collective on another stream has read is free once the device has passed it. The
    host runs ahead of the device in a backward: the forward that follows finds none of them back
    and takes fresh blocks; the first forwards of a step do. Where more micro-batches are in flight,
    smaller tensors that are stored split the freed blocks; those that are larger than all else
    that is stored are used again as they are.
    """
    rank_class = program.classes[index]
    if not stack.gather_holes or not _forward_after_backward(rank_class):
        return 0.0
    whole, largest, stored = _gathered(program, rank_class)
    alive = _alive(rank_class)
    if alive == 1:
        return stack.gather_holes * whole
    return stack.pipeline_holes * alive * whole if stored > largest else 0.0


def _forward_after_backward(rank_class: RankClass) -> bool:
    """Whether some forward of a step follows a backward."""
    slots = [entry.slot for entry in rank_class.entries if isinstance(entry, Run)]
    return "B" in slots and "F" in slots[slots.index("B") :]


def _alive(rank_class: RankClass) -> int:
    """The most micro-batches of one chunk whose forward has begun and whose backward has not ended.

    A pass may be one entry, or one for every unit.
    """
    runs = [entry for entry in rank_class.entries if isinstance(entry, Run) and entry.chunk == 0]
    last = {run.microbatch: i for i, run in enumerate(runs) if run.slot == "B"}
    alive: set[int] = set()
    most = 0
    for i, run in enumerate(runs):
        if run.slot == "F":
            alive.add(run.microbatch)
            most = max(most, len(alive))
        elif run.slot == "B" and last[run.microbatch] == i:
            alive.discard(run.microbatch)
    return most


def _gathered(program: Program, rank_class: RankClass) -> tuple[float, float, float]:
    """Bytes that one forward gathers over tp, of the largest gather, and the largest stored."""
    total = largest = stored = 0.0
    for entry in rank_class.entries:
        if isinstance(entry, Run) and entry.slot == "F" and entry.microbatch == 0:
            for segment in entry.segments:
                for item in program.segments[segment].items:
                    stored = max(stored, item.delta.get("activations", 0.0))
                    event = program.events[item.event]
                    gathers = isinstance(event, CommEvent) and event.collective == "all_gather"
                    if gathers and item.category == "tp":
                        total += event.bytes
                        largest = max(largest, event.bytes)
    return total, largest, stored


def process_groups(mesh: Mesh) -> int:
    """Returns the process groups a rank communicates in: one per axis, and the world."""
    split = sum(size > 1 for size in mesh.sizes)
    return split + 1 if split > 1 else split


def host_used(program: Program, devices_per_node: int) -> float:
    """Returns the bytes that the ranks of the fullest node keep in the memory of their host."""
    nodes: dict[int, float] = {}
    for rank_class in program.classes:
        kept = sum(rank_class.host_bytes.values())
        for rank in rank_class.ranks if kept else ():
            node = rank // devices_per_node
            nodes[node] = nodes.get(node, 0.0) + kept
    return max(nodes.values(), default=0.0)
