"""A software stack: which kernels run, what is fused, what the host costs. Data, not code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """One file of catalog/stacks.

    `attention` fused (flash) or unfused; `gemm_kernel` names kernels of gemm.toml. `fused` lists
    the operator groups that run as one GEMM (qkv, gate_up). `kernels` is the number of launches of
    an operator (forward), `eager_bytes` multiplies the bytes of an ideally fused kernel; both by
    cost name, "*" for all others, absent = 1. `autocast_bytes` goes before it in 16-bit operators:
    torch.autocast computes some of them in fp32. An operator of 0 launches is part of a neighbour's
    kernel and costs nothing. `defaults` is what runs of this software do unless they say otherwise
    (precision, zero, sequence_parallel, recompute); `validate runs` reads it where a source states
    nothing.
    """

    name: str
    preset: str
    description: str = ""
    attention: str = "fused"
    attention_kernel: str = "flash2"
    vector_misaligned: bool = False  # batches of misaligned products run off the tensor units
    gemm_kernel: str = ""  # a kernel with constants of its own in gemm.toml; "": the usual library
    #: Kernels of products narrower than 16 bits, by format, where no `gemm_kernel` is named.
    low_kernels: Mapping[str, str] = field(default_factory=dict[str, str])
    fused_scores: tuple[str, ...] = ()  # what that kernel does: alibi, relative, softcap
    fused: tuple[str, ...] = ()
    selective: str = "core"  # what selective recompute repeats: core or operators
    kernels: Mapping[str, float] = field(default_factory=dict[str, float])
    eager_bytes: Mapping[str, float] = field(default_factory=dict[str, float])
    autocast_bytes: Mapping[str, float] = field(default_factory=dict[str, float])
    half_share: float = 1.0  # bandwidth of 16-bit element-wise kernels over that of 32-bit ones
    host_launch_us: float = 6.0  # host time per launched kernel
    host_op_us: float = 10.0  # host time per operator (dispatch, autograd, module code)
    host_comm_us: float = 15.0  # host time per collective call
    host_op_us_by: Mapping[str, float] = field(default_factory=dict[str, float])
    host_on: Mapping[str, float] = field(default_factory=dict[str, float])  # generation: x slower
    host_backward: float = 1.0  # host time of a backward operator over that of a forward one
    sync_blocks: bool = False  # the host waits for the device after every block (timed layers)
    launch_blocking: bool = False  # the host waits after every launch (CUDA_LAUNCH_BLOCKING=1)
    rank_skew_us: float = 0.0  # a waiting host: ranks reach a collective with delays of this mean
    cuda_graphs: bool = False
    p2p_sync: bool = False  # the host waits for pipeline transfers
    overlap_p2p: bool = False  # interleaved schedules post their transfers early
    scatter_gather: bool = False  # without SP a stage sends 1/tp and gathers it over tp
    overlap_tp: bool = False  # tensor-parallel communication hides behind weight gradients
    optimizer: str = "fused"  # fused, foreach, loop
    grad_norm: bool = True
    context_gib: float = 0.5  # device context and libraries, outside the allocator
    communicator_gib: float = 0.3  # NCCL buffers of one process group, outside the allocator
    workspace_gib: float = 0.1  # workspaces of GEMM libraries, inside the allocator
    fragmentation: float = 0.03  # reserved over allocated
    logits_dtype: str = "fp32"
    logits_copies: float = 1.0  # copies of the logits in that dtype that live until backward
    loss_chunks: int = 1  # parts of the sequence whose logits are made one after the other
    pipeline_slack: float = 0.0  # reserved over live activations with several micro-batches alive
    gather_slack: float = 0.0  # more reserved over allocated where weights are gathered (FSDP)
    gather_holes: float = 0.0  # share of the buffers of tp collectives a forward takes afresh
    pipeline_holes: float = 0.0  # the same for every micro-batch in flight in a pipeline
    late_accumulate: bool = False  # gradients are added to their accumulators after the backward
    low_saved: tuple[str, ...] = ()  # formats in which linear layers keep their input for backward
    low_gather: bool = True  # tp gathers what narrow products read after its cast, not before
    quantized_weights: bool = False  # copies of weights in the narrow format live all step
    expandable_segments: bool = False  # the allocator maps pages: no holes between blocks
    flat_step: bool = False  # the step copies a rank's gradients to one fp32 buffer
    flat_gather: bool = False  # ZeRO's gather of new weights copies them to flat buffers, twice
    flat_buckets: bool = False  # DDP of apex: a bucket is flat while it is reduced, not all step
    ddp_buckets: bool = False  # replicas without ZeRO are DDP: buckets hold all gradients once more
    stage_split: str = "even"  # layers over stages: even, or by_cost of layers and head (nanotron)
    whole_gradients: bool = False  # DDP without ZeRO; with ZeRO-1 all-reduces of all gradients
    bucket_passes: float = 0.0  # over all gradients: into flat buckets, divided, and back
    owner_broadcasts: bool = False  # ZeRO-1 gives whole weights to ranks, each broadcasts its own
    kernel_factor: float = 1.0  # time of kernels over that with the libraries of the tables
    zero_gather_us: float = 0.0  # host time per weight and rank to take gathered weights apart
    checked_collectives: bool = False  # ranks compare notes before each one (step.toml)
    sparse_exchange: bool = False  # of row-wise tables only sums that are not empty are sent
    channels_last: bool = False  # feature maps; else convolutions on tensor cores transpose them
    precision: Mapping[str, Mapping[str, str]] = field(default_factory=dict[str, Mapping[str, str]])
    defaults: Mapping[str, str | int | bool] = field(default_factory=dict[str, str | int | bool])
    sources: Mapping[str, str] = field(default_factory=dict[str, str])

    def product_kernel(self, dtype: str) -> str:
        """Returns the kernel of matrix products in `dtype`, "" for the usual library."""
        return self.gemm_kernel or self.low_kernels.get(dtype, "")
