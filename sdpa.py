"""Torch's attention kernels: which one runs when, and how to call it for a single block of keys.

    a whole sequence    forward     F.scaled_dot_product_attention(q, k, v, ...)               ─►  o
                        backward    autograd calls the kernel's backward

    a block of keys     forward     aten._scaled_dot_product_KERNEL(q, k, v, ...)              ─►  o, lse
                                    cp.py merges the o and the lse of all blocks
                        backward    aten._scaled_dot_product_KERNEL_backward(
                                        do, q, k, v, merged o, merged lse, ...)                ─►  dq, dk, dv

KERNEL is cudnn_attention, flash_attention, or on a CPU flash_attention_for_cpu.

Shapes: B batch, N query heads, K key and value heads, D width of a query or key, V width of a
value, which is D or less; rows: queries, columns: keys. q [B, N, rows, D], k [B, K, columns, D] and
v [B, K, columns, V] give o [B, N, rows, V] and lse [B, N, rows], the log-sum-exp of each row's
scores.

Torch has several attention kernels, which it calls backends. A fused kernel never writes the scores
[rows, columns] to memory. "math" is not fused: it writes them, and saves them for backward. The
table says what we give each kernel for whole sequences. Torch takes the first kernel in it that
fits the call. Blocks have fewer kernels to choose from (below).

    kernel      device   dtypes          mask                         D            heads of k and v
    cuDNN       GPU      16 bits         none, or is_causal           to 128, or   K
                                                                      192 (V 128)
    flash       GPU      16 bits         none, or is_causal           to 256       K
    efficient   GPU      16 or 32 bits   none, is_causal, or tensor   aligned      N (each repeated)
    math        GPU      any             none, is_causal, or tensor   any          K, or N (each repeated)
    flash       CPU      any             none, is_causal, or tensor   any          K, or N (each repeated) with a tensor

Aligned: D and V are multiples of 8 in 16 bits, and of 4 in fp32, on Ampere and later GPUs. Torch's
public function pads other widths for flash, and gives them to math where flash does not fit.

Masks have three kinds (`Mask.kind` in operations.py):

    "unmasked"   no mask. Each query sees each key, as one new token sees all cached keys.
    "causal"     torch's is_causal. Queries and keys are the same tokens; only later keys are hidden.
    "general"    a boolean tensor, the result of `Mask.visible`: [rows, columns], or with documents
                 [B, 1, rows, columns]. Needed for windows, documents, and several new tokens after
                 cached keys.

Whole sequences (`attention_sdpa`): we set the order of preference that the table has for GPUs. cuDNN
is first because others report that on Hopper it is faster than FlashAttention 2, which torch's
flash is (plan/step_time.py), and than a kernel in Triton (docs/NOTES.md). We have not measured this
ourselves. math is last because it saves the scores.

Blocks (`sdpa_forward`, `sdpa_backward`): merging the results of blocks requires the lse, which the
public function does not return. Autograd of the public function would use the block's own o and
lse, but the gradients need the merged ones. So we call the private operators of one kernel:

    on a GPU    cuDNN       up to D = 128, and D = 192 with V = 128
                flash       other widths up to 256
    on a CPU    flash       all blocks

On a GPU, math_forward and math_backward of operations.py compute the other blocks: blocks with a mask
tensor, blocks in fp32 or fp64, and blocks whose D is above 256 or not a multiple of 8
(`has_gpu_kernel`). flash's operator would refuse all of these. cuDNN's operator would accept a mask
tensor and refuse the rest.

On a CPU, flash takes K < N heads of keys and values with and without a mask tensor, by the public
function and by the private operator. For whole sequences with a tensor we repeat the heads all the
same, because on a GPU no fused kernel takes K < N with a tensor.

Narrow values, V < D, as latent attention has them (mla.py): flash needs V = D, on GPUs and on CPUs.
There values are padded with zeros, which costs 2 D / (D + V) times the FLOPs of forward. The other
kernels take narrow values as they are (`needs_padding`). DeepSeek-V3's widths are 192 and 128.
cuDNN takes them on Hopper and on data center Blackwell.

Easily got wrong: torch's cuDNN also accepts mask tensors and some wider heads. With a mask tensor
its backward may return NaN, and for wider heads torch may refuse the backward. So we give cuDNN
neither (`choose_sdpa_kernels`, `has_gpu_kernel`, `fits_cudnn`).

Who decides: cp.choose_attention picks an AttentionKernel for each window of a model: SDPA (this
file), MATH (operations.py) or Triton's (flash.py). flash.py calls this file where its kernels do
not run. `python sdpa.py` prints which kernels run on this machine.

Dao et al. 2022 (flash); Rabe & Staats 2021 (efficient).
"""
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from core.collectives import run_demo
from core.config import need
from operations import AttentionKernel, Mask, math_backward, math_forward, repeat_kv_heads

# ---- the plain version: two blocks of keys, without a mask, on a CPU -------------------------------------------------

def plain_forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Attend to one block of keys, with V = D: (o [B, N, rows, D], lse [B, N, rows])."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)


def plain_backward(do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
    """Compute the block's dq, dk and dv. o, lse: the row's, merged from all blocks."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        do, q, k, v, o, lse, dropout_p=0.0, is_causal=False)


def attend_in_two_blocks(q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> tuple[Tensor, ...]:
    """Attend to the two halves of the keys, and merge: (o, dq, dk, dv) of attention to all keys."""
    (k_1, k_2), (v_1, v_2) = k.chunk(2, 2), v.chunk(2, 2)
    o_1, lse_1 = plain_forward(q, k_1, v_1)
    o_2, lse_2 = plain_forward(q, k_2, v_2)
    lse = torch.logaddexp(lse_1, lse_2)
    o = (lse_1 - lse).exp()[..., None] * o_1 + (lse_2 - lse).exp()[..., None] * o_2  # cp.py explains the formula
    dq_1, dk_1, dv_1 = plain_backward(do, q, k_1, v_1, o, lse)
    dq_2, dk_2, dv_2 = plain_backward(do, q, k_2, v_2, o, lse)
    return o, dq_1 + dq_2, torch.cat((dk_1, dk_2), 2), torch.cat((dv_1, dv_2), 2)


# ---- which kernel torch takes ---------------------------------------------------------------------------------------

# The fastest on Hopper first, as others report.
SDPA_ORDER = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
CUDNN_WIDTH = 128  # the widest heads that we give cuDNN: for wider ones, such as 192, torch may refuse its backward
DEEPSEEK_WIDTHS = 192, 128  # D and V: the exception. Torch takes cuDNN for them if it has a forward and a backward here
FLASH_WIDTH = 256  # the widest heads that flash takes on a GPU


@cache
def set_sdpa_order() -> AbstractContextManager:
    """Let torch take the first kernel of SDPA_ORDER that runs, until this process ends.

    Entering and leaving the context at each call of F.scaled_dot_product_attention would take 25 of
    the 32 us that the host needs for that call (measured on a CPU: docs/NOTES.md). `cache` keeps
    the context manager alive: if it were garbage-collected, it would exit and restore the old order.
    """
    context = sdpa_kernel(SDPA_ORDER, set_priority=True)
    context.__enter__()
    return context


def choose_sdpa_kernels(cudnn: bool) -> None:
    """Set which kernels the next F.scaled_dot_product_attention on a GPU may choose.

    Allow all kernels of SDPA_ORDER, but cuDNN only if `cudnn`. cuDNN must not get widths that
    `fits_cudnn` excludes. It must not get a mask tensor either, because its backward then returns
    NaN for some lengths (pytorch#196678).
    """
    set_sdpa_order()
    torch.backends.cuda.enable_cudnn_sdp(cudnn)  # a flag, which takes 0.7 us of the host to set, on a CPU


def fits_cudnn(q: Tensor, v: Tensor) -> bool:
    """Return whether we give heads of these widths to cuDNN."""
    widths = q.shape[-1], v.shape[-1]
    return max(widths) <= CUDNN_WIDTH or widths == DEEPSEEK_WIDTHS


# ---- attention of whole sequences -----------------------------------------------------------------------------------

def attention_sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    """Attend to all keys, without saving scores (unless no fused kernel takes the call).

    q: [B, N, rows, D]; k: [B, K, columns, D]; v: [B, K, columns, V] -> o [B, N, rows, V].
    """
    kind = mask.kind(q.shape[2], k.shape[2])
    if needs_padding(q, k, v, kind):
        return OneBlock.apply(q, k, v, mask)
    visible = mask.visible(q.shape[2], k.shape[2], q.device) if kind == "general" else None
    if q.is_cuda:
        choose_sdpa_kernels(fits_cudnn(q, v) and visible is None)
    # What flash refuses, cuDNN does not get, either. It goes to the efficient kernel, or in fp64 to math.
    flash_refuses = q.is_cuda and (q.itemsize > 2 or q.shape[-1] > FLASH_WIDTH)
    if kind == "general" or flash_refuses:  # here no fused kernel for GPUs takes K < N
        k, v = repeat_kv_heads(q, k, v)
    return F.scaled_dot_product_attention(q, k, v, visible, is_causal=kind == "causal",
                                          enable_gqa=q.shape[1] > k.shape[1])  # False after repeat_kv_heads


# ---- attention of one block of keys ---------------------------------------------------------------------------------
# sdpa_forward and sdpa_backward do the same as plain_forward and plain_backward, also with masks and
# on GPUs. For rows that see no key of the block, sdpa_forward returns an lse of -inf, so that merging
# does not change these rows.

def check_heads(q: Tensor, k: Tensor) -> None:
    """Refuse a K that does not divide N: torch's kernel for CPUs would read beyond the last key
    head."""
    need(q.shape[1] % k.shape[1] == 0, f"{k.shape[1]} key heads do not divide {q.shape[1]} query heads")


def sdpa_forward(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> tuple[Tensor, Tensor]:
    """Attend to one block of keys: see AttentionKernel.forward in operations.py."""
    check_heads(q, k)
    kind = mask.kind(q.shape[2], k.shape[2])
    if needs_padding(q, k, v, kind):
        o, lse = sdpa_forward(q, k, pad_to_keys(v, k), mask)
        return o.narrow(-1, 0, v.shape[-1]).clone(), lse  # cloned, because a view would keep the padding in memory
    if q.is_cuda:
        return (gpu_forward if has_gpu_kernel(q, kind) else math_forward)(q, k, v, mask)
    bias = additive_mask(q, k, mask) if kind == "general" else None
    o, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, dropout_p=0.0, is_causal=kind == "causal", attn_mask=bias)
    if bias is not None:  # for rows that see no key this kernel returns o = 0, but a log-sum-exp other than -inf
        lse = lse.masked_fill(bias.isneginf().all(-1), -torch.inf)
    return o, lse


def sdpa_backward(do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
                  mask: Mask) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of one block: see AttentionKernel.backward in operations.py."""
    check_heads(q, k)
    kind = mask.kind(q.shape[2], k.shape[2])
    if needs_padding(q, k, v, kind):
        padded_do, padded_v, padded_o = (pad_to_keys(x, k) for x in (do, v, o))
        dq, dk, dv = sdpa_backward(padded_do, q, k, padded_v, padded_o, lse, mask)
        return dq, dk, dv.narrow(-1, 0, v.shape[-1])
    if q.is_cuda:
        return (gpu_backward if has_gpu_kernel(q, kind) else math_backward)(do, q, k, v, o, lse, mask)
    bias = additive_mask(q, k, mask) if kind == "general" else None
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        do, q, k, v, o, lse, dropout_p=0.0, is_causal=kind == "causal", attn_mask=bias)


def additive_mask(q: Tensor, k: Tensor, mask: Mask) -> Tensor:
    """Make the tensor that the kernel adds to the scores: 0, or -inf where a query does not see a
    key."""
    visible = mask.visible(q.shape[2], k.shape[2], q.device)
    return torch.zeros_like(visible, dtype=q.dtype).masked_fill_(~visible, -torch.inf)


def has_gpu_kernel(q: Tensor, kind: str) -> bool:
    """Whether cuDNN or flash takes a block. kind: the result of Mask.kind.

    Torch's public function pads heads whose width is not a multiple of 8. The private operators
    refuse them.
    """
    D = q.shape[-1]
    return kind != "general" and q.itemsize <= 2 and D <= FLASH_WIDTH and D % 8 == 0


def gpu_forward(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> tuple[Tensor, Tensor]:
    """Attend with cuDNN, or with flash for heads that do not fit it.

    The first call with a shape is slow, because cuDNN makes a plan for it.
    """
    is_causal = mask.kind(q.shape[2], k.shape[2]) == "causal"
    if not fits_cudnn(q, v):
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, dropout_p=0.0, is_causal=is_causal)[:2]
    o, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, attn_bias=None, compute_log_sumexp=True, dropout_p=0.0, is_causal=is_causal)
    return o, lse.view(q.shape[:3])  # from [B, N, rows, 1]


def gpu_backward(do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
                 mask: Mask) -> tuple[Tensor, Tensor, Tensor]:
    """Compute gradients with the kernel that gpu_forward used.

    Not deterministic. torch.use_deterministic_algorithms makes flash's backward deterministic, but
    not cuDNN's (pytorch#182551).
    """
    seed = torch.empty(0, dtype=torch.int64, device=q.device)  # unused: there is no dropout
    options = dict(cum_seq_q=None, cum_seq_k=None, max_q=q.shape[2], max_k=k.shape[2], dropout_p=0.0,
                   is_causal=mask.kind(q.shape[2], k.shape[2]) == "causal", philox_seed=seed, philox_offset=seed)
    if not fits_cudnn(q, v):
        return torch.ops.aten._scaled_dot_product_flash_attention_backward(do, q, k, v, o, lse, **options)
    return torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        do, q, k, v, o, lse.unsqueeze(-1), attn_bias=None, **options)


# ---- values narrower than keys --------------------------------------------------------------------------------------
# Zeros beside the values make zeros beside o, and change nothing else: scores do not depend on values.

def needs_padding(q: Tensor, k: Tensor, v: Tensor, kind: str) -> bool:
    """Whether v must be padded: it is narrower than k, and the kernel that this call gets needs V = D.

    kind: the result of Mask.kind.

    This may set a global flag of torch, because can_use_cudnn_attention reads the flag. Before its
    call of torch, attention_sdpa sets the flag again. The private operators of blocks do not read it.
    """
    if v.shape[-1] == k.shape[-1]:
        return False
    if not q.is_cuda:
        return True  # the CPU's flash. Without padding torch would take math, which saves the scores
    if not has_gpu_kernel(q, kind):
        return False  # efficient and math take narrow values
    choose_sdpa_kernels(cudnn=True)  # an earlier call may have disabled cuDNN
    params = SDPAParams(q, k, v, None, 0.0, kind == "causal", q.shape[1] > k.shape[1])
    return not (fits_cudnn(q, v) and can_use_cudnn_attention(params))


def pad_to_keys(x: Tensor, k: Tensor) -> Tensor:
    """Pad v, o or do with zeros to the width of keys."""
    return F.pad(x, (0, k.shape[-1] - x.shape[-1]))


class OneBlock(Function):
    """Attend to all keys as to one block of keys, so that padding is not saved for backward.

    Autograd would save padded values and the padded o.
    """

    @staticmethod
    def forward(ctx, q, k, v, mask):
        o, lse = sdpa_forward(q, k, v, mask)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.mask = mask
        return o

    @staticmethod
    def backward(ctx, do):
        return *sdpa_backward(do, *ctx.saved_tensors, ctx.mask), None


# The tensor of a "general" mask is prepared once for all layers (AttentionKernel.prepare_mask).
SDPA = AttentionKernel(attention_sdpa, sdpa_forward, sdpa_backward, kinds_as_tensor=("general",))


# ---- demo: python sdpa.py -------------------------------------------------------------------------------------------

class CalledKernels(TorchDispatchMode):
    """A context that notes the name of each attention kernel that torch calls."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if name.startswith("_scaled_dot_product"):
            self.names.append(name.removeprefix("_scaled_dot_product_").replace("_attention", ""))
        return function(*args, **(kwargs or {}))


def find_kernel(attend: Callable, *inputs: Tensor | Mask) -> str:
    """Name the kernel that attend(*inputs) calls: "math" if it calls none, only plain matmuls."""
    with CalledKernels() as called:
        attend(*inputs)
    return called.names[0] if called.names else "math"


def demo() -> None:
    """Show which kernels run here, and that two blocks with a merged lse are attention to all
    keys."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(f"Attention of 8 query heads and 2 key and value heads on {device}: which kernel computes it?\n\n"
          f"{'dtype':10s}{'D':5s}{'mask':12s}{'whole sequences':18s}a block of context parallelism")
    for dtype, D, mask in [
            (torch.bfloat16, 128, Mask()), (torch.bfloat16, 128, Mask(causal=False)), (torch.bfloat16, 192, Mask()),
            (torch.bfloat16, 128, Mask(window=100)), (torch.float32, 128, Mask()), (torch.float64, 128, Mask())]:
        q, k, v = (torch.randn(1, heads, 256, D, device=device, dtype=dtype) for heads in (8, 2, 2))
        block = find_kernel(sdpa_forward, q, k, v, mask)
        q.requires_grad_()  # torch refuses some kernels because of their backward
        whole = find_kernel(attention_sdpa, q, k, v, mask)
        print(f"{str(dtype).removeprefix('torch.'):10s}{D:<5d}{mask.kind(256, 256):12s}{whole:18s}{block}")

    torch.manual_seed(0)
    q, k, v, do = (torch.randn(2, heads, 64, 32, dtype=torch.float64) for heads in (8, 2, 2, 8))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    o = F.scaled_dot_product_attention(*leaves, enable_gqa=True)
    expected = [o.detach(), *torch.autograd.grad(o, leaves, do)]
    found = attend_in_two_blocks(q, k, v, do)
    error = max((ours - want).abs().max() / want.abs().max() for ours, want in zip(found, expected))
    print("\nTwo blocks of keys, merged, equal attention to all keys, also in backward. "
          f"Relative difference: {error:.0e}")

    k_1, v_1, expected_dk = k[:, :, :32], v[:, :, :32], expected[2][:, :, :32]
    own_o, own_lse = plain_forward(q, k_1, v_1)
    _, dk, _ = plain_backward(do, q, k_1, v_1, own_o, own_lse)
    wrong = (dk - expected_dk).norm() / expected_dk.norm()
    print(f"With its own o and lse in place of the merged ones, dk of the first block is {wrong:.0%} off.")


if __name__ == "__main__":
    run_demo(lambda group: demo())
