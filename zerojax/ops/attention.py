"""Attention, and the choice of its kernel. This module calls XLA's, cuDNN's or, on TPUs, JAX's splash kernel.

Shapes: B batch, T queries, S keys, H query heads, K key and value heads, N head dim.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from pallas_kernels import cached_attention
from zerojax import mesh as mesh_lib
from zerojax import specs, xla_flags
from zerojax.errors import UserError
from zerojax.ops import cudnn_attention, softcap

Kernel = Literal["xla", "cudnn", "splash"]  # the last two never materialise the scores
NARROW, WIDEST = 128, 256  # the most dims of a head that cuDNN's kernel takes: on any GPU, and from Hopper on
LANES = 128  # sequences of splash attention are a multiple of it
_HOPPER = 9.0
_BLOCKS = (512, 256, LANES)  # queries, and keys, of a tile; the largest that divides is taken


def attend(
    q_BTHN: jax.Array,
    k_BSKN: jax.Array,
    v_BSKN: jax.Array,
    kernel: Kernel,
    *,
    is_causal: bool,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    scale: float | None = None,
    window: int = 0,
    cap: float = 0.0,
) -> jax.Array:
    """Returns softmax(scale * q k^T + bias) v: float[B, T, H, N]. Under a mask, a causal query that sees no key has 0, as in PyTorch.

    With a cap it has the mean of all values, as in transformers, whose capped attention is not PyTorch's.

    Args:
      q_BTHN, k_BSKN, v_BSKN: queries, keys and values. H is a multiple of K, and H / K adjacent query heads share keys and values.
      kernel: the implementation. "splash" is for causal self-attention without bias, mask and window, on one device's arrays (inside
        `jax.shard_map`) and a multiple of 128 positions; XLA's kernel runs elsewhere, such as in sampling.
      is_causal: a query sees no later key.
      bias: float[H, T, S] or float[B, H, T, S], added to the scores; None for no bias.
      mask: bool[B, S], False for keys that no query sees, or bool[B, T, S], False for keys that a query does not see; None for no mask.
      scale: multiplies the scores; None: 1 / sqrt(N).
      window: a query sees its own token and the `window` - 1 before it; 0 for no limit.
      cap: bounds the scores (`softcap`), before the bias; 0 for no bound. With it XLA's kernel runs, whatever `kernel` is.
    """
    is_limited = 0 < window < k_BSKN.shape[1]
    is_plain = is_causal and bias is None and mask is None and not is_limited and not cap
    if kernel == "splash" and is_plain and _splash_can_run(q_BTHN, k_BSKN):
        return splash(q_BTHN, k_BSKN, v_BSKN, scale=scale)
    must_repeat = kernel == "cudnn" and xla_flags.is_deterministic()
    kernel = "xla" if kernel == "splash" or cap or (must_repeat and bias is not None) else kernel
    # JAX's CPU backend does not support this function's float16 matmuls, and its bfloat16 ones not where all scores of a device are one.
    is_single = q_BTHN.shape[1] == k_BSKN.shape[1] == 1
    is_wide = kernel == "xla" and (q_BTHN.dtype == jnp.float16 or is_single)
    dtype = jnp.float32 if is_wide else q_BTHN.dtype
    out_dtype = q_BTHN.dtype
    q_BTHN, k_BSKN, v_BSKN = q_BTHN.astype(dtype), k_BSKN.astype(dtype), v_BSKN.astype(dtype)
    attended: Callable[..., jax.Array] = functools.partial(
        jax.nn.dot_product_attention,
        scale=scale,
        is_causal=is_causal,
        local_window_size=(window - 1, 0) if is_limited else None,
        implementation=kernel,
    )
    if cap:
        attended = functools.partial(
            _capped, scale=scale, is_causal=is_causal, window=window if is_limited else 0, cap=cap
        )
    if kernel == "cudnn":
        if must_repeat:
            attended = _repeatable(q_BTHN.shape[3] ** -0.5 if scale is None else scale, is_causal, window * is_limited)
        attended = for_cudnn(attended, is_causal=is_causal)
    if mesh_lib.rest():
        attended = of_heads(attended, q_BTHN.shape[2], k_BSKN.shape[2])
    bias = bias[None] if bias is not None and bias.ndim == 3 else bias
    masks = mask if mask is None else mask[:, None, None, :] if mask.ndim == 2 else mask[:, None]
    try:
        y_BTHN = attended(q_BTHN, k_BSKN, v_BSKN, bias, masks)
    except NotImplementedError as error:  # JAX knows what cuDNN takes
        raise UserError(f"attention: {kernel} does not take these arrays; set `attention=xla` ({error})") from error
    if is_causal and mask is not None and not cap:
        sees_BT = _sees_a_key(mask, q_BTHN.shape[1], window)
        y_BTHN = jnp.where(sees_BT[:, :, None, None], y_BTHN, 0)
    return y_BTHN.astype(out_dtype)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class TokenReader:
    """How a kernel reads caches that several devices may share. The compiler does not shard a kernel, so each device reads its own part.

    Attributes:
      mesh: the devices.
      rows: mesh axes over which rows are sharded.
      implementation: "pallas", or "interpret" on a CPU.
    """

    mesh: Mesh
    rows: tuple[str, ...] = ()
    implementation: str = "pallas"

    def specs_of(self, heads: int, kv_heads: int) -> tuple[P, P]:
        """Returns the specs of queries [B, 1, H, N] and of a cache [B, S, K, N]: heads are sharded where devices share those of keys."""
        ways, rows = mesh_lib.size(self.mesh, mesh_lib.COMPILER), specs.entry(self.rows)
        axes = specs.entry(mesh_lib.COMPILER) if ways > 1 else None
        queries = axes if kv_heads % ways == 0 or (kv_heads == 1 and heads % ways == 0) else None
        return P(rows, None, queries), P(rows, None, axes if kv_heads % ways == 0 else None)


def attend_token(
    q_B1HN: jax.Array,
    k_BSKN: jax.Array,
    v_BSKN: jax.Array,
    ends_B: jax.Array,
    reader: TokenReader,
    *,
    scale: float | None = None,
    window: int = 0,
) -> jax.Array:
    """Returns the attention of each row's last token to the first `ends_B` slots of its cache: float[B, 1, H, N]. It reads no other slots.
    A row of 0 slots has 0."""
    scale = q_B1HN.shape[3] ** -0.5 if scale is None else scale

    def run(q_B1HN: jax.Array, k_BSKN: jax.Array, v_BSKN: jax.Array, ends_B: jax.Array) -> jax.Array:
        how: dict[str, Any] = {"scale": scale, "window": window, "implementation": reader.implementation}
        y_BHN = cached_attention.attend(q_B1HN[:, 0], k_BSKN, v_BSKN, ends_B, **how)
        return y_BHN[:, None].astype(q_B1HN.dtype)

    if reader.mesh.size > 1:
        queries, keys = reader.specs_of(q_B1HN.shape[2], k_BSKN.shape[2])
        in_specs = queries, keys, keys, P(queries[0])
        run = jax.shard_map(run, mesh=reader.mesh, in_specs=in_specs, out_specs=queries, check_vma=False)
    return run(q_B1HN, k_BSKN, v_BSKN, ends_B)


def token_kernel_can_run(q_B1HN: jax.Array, k_BSKN: jax.Array, reader: TokenReader) -> bool:
    """Returns whether `attend_token` takes arrays of these shapes and dtypes."""
    shards = [
        jax.ShapeDtypeStruct(NamedSharding(reader.mesh, spec).shard_shape(array.shape), array.dtype)
        for array, spec in zip((q_B1HN, k_BSKN), reader.specs_of(q_B1HN.shape[2], k_BSKN.shape[2]))
    ]
    return q_B1HN.dtype == k_BSKN.dtype and cached_attention.takes(shards[0].shape[2], shards[1])


def _capped(
    q_BTHN: jax.Array,
    k_BSKN: jax.Array,
    v_BSKN: jax.Array,
    bias: jax.Array | None,
    mask: jax.Array | None,
    *,
    scale: float | None,
    is_causal: bool,
    window: int,
    cap: float,
) -> jax.Array:
    """Returns what `jax.nn.dot_product_attention` does, with scores that are bounded before bias and masks: bool[B, 1, T or 1, S]."""
    (batch, queries, heads, width), keys = q_BTHN.shape, k_BSKN.shape[1]
    q_BTKGN = q_BTHN.reshape(batch, queries, k_BSKN.shape[2], -1, width)
    scores_BKGTS = jnp.einsum("btkgn,bskn->bkgts", q_BTKGN, k_BSKN, preferred_element_type=jnp.float32)
    scores_BHTS = scores_BKGTS.reshape(batch, heads, queries, keys) * (width**-0.5 if scale is None else scale)
    scores_BHTS = softcap.softcap(scores_BHTS, cap)
    scores_BHTS = scores_BHTS if bias is None else scores_BHTS + bias
    distance_TS = jnp.arange(queries)[:, None] - jnp.arange(keys)
    seen = distance_TS >= 0 if is_causal else jnp.ones_like(distance_TS, bool)
    seen = seen & (distance_TS < window) if window else seen
    seen = seen if mask is None else seen & mask
    lowest = jnp.finfo(jnp.float32).min / 2
    weights_BHTS = jax.nn.softmax(jnp.where(seen, scores_BHTS, lowest), axis=-1).astype(v_BSKN.dtype)
    weights_BKGTS = weights_BHTS.reshape(scores_BKGTS.shape)
    return jnp.einsum("bkgts,bskn->btkgn", weights_BKGTS, v_BSKN).reshape(q_BTHN.shape)


def _repeatable(scale: float, is_causal: bool, window: int) -> Callable[..., jax.Array]:
    """Returns attention of (q, k, v, bias, masks) by cuDNN whose calls may repeat in a program that is deterministic."""

    def run(q: jax.Array, k: jax.Array, v: jax.Array, bias: None, masks: jax.Array | None) -> jax.Array:
        return cudnn_attention.attend(q, k, v, masks if masks is None else masks[:, 0], scale, is_causal, window)

    return run


def for_cudnn(attended: Callable[..., jax.Array], *, is_causal: bool) -> Callable[..., jax.Array]:
    """Returns attention of (q, k, v, bias, masks) whose masks have a row for each query, and whose numbers of queries and of keys are
    made even by one that no other reads. JAX hands cuDNN no others in training."""

    def run(
        q_BTHN: jax.Array, k_BSKN: jax.Array, v_BSKN: jax.Array, bias: jax.Array | None, masks: jax.Array | None
    ) -> jax.Array:
        queries, keys = q_BTHN.shape[1], k_BSKN.shape[1]
        more_q, more_k = queries % 2, keys % 2
        if masks is None and more_k and not (is_causal and queries == keys):
            masks = jnp.ones((1, 1, 1, keys), bool)
        if masks is not None:
            masks = jnp.broadcast_to(masks, (*masks.shape[:2], queries, keys))
        if not more_q and not more_k:
            return attended(q_BTHN, k_BSKN, v_BSKN, bias, masks)
        if masks is not None:
            masks = jnp.pad(masks, ((0, 0), (0, 0), (0, more_q), (0, 0)), mode="edge")
            masks = jnp.pad(masks, ((0, 0), (0, 0), (0, 0), (0, more_k)))
        if bias is not None:
            bias = jnp.pad(bias, ((0, 0), (0, 0), (0, more_q), (0, more_k)))
        q_BTHN = jnp.pad(q_BTHN, ((0, 0), (0, more_q), (0, 0), (0, 0)))
        k_BSKN, v_BSKN = (jnp.pad(x, ((0, 0), (0, more_k), (0, 0), (0, 0))) for x in (k_BSKN, v_BSKN))
        return attended(q_BTHN, k_BSKN, v_BSKN, bias, masks)[:, :queries]

    return run


def of_heads(attended: Callable[..., jax.Array], heads: int, kv_heads: int) -> Callable[..., jax.Array]:
    """Returns attention of (q, k, v, bias, masks) in which each device along the axes that the compiler shards has its heads, or
    all if they do not divide them. Of key heads that do not divide, a device takes those that its query heads read.

    cuDNN's kernel does not compile where XLA would have to shard it.
    """
    axes = mesh_lib.rest()
    if not axes:
        return attended
    ways, axis = mesh_lib.ways_of_rest(), specs.entry(axes)
    divides = heads % ways == 0
    queries, scores = (P(None, None, axis), P(None, axis)) if divides else (P(), P())
    keys = queries if kv_heads % ways == 0 else P()

    def of_own(q_BTHN: jax.Array, k_BSKN: jax.Array, v_BSKN: jax.Array, *rest: Any) -> jax.Array:
        own, group = heads // ways, heads // kv_heads
        read = 1 if group % own == 0 else own  # heads of one group share their keys
        index = (jax.lax.axis_index(axis) * own + jnp.arange(read)) // group
        return attended(q_BTHN, *(jnp.take(x, index, axis=2) for x in (k_BSKN, v_BSKN)), *rest)

    function = of_own if divides and keys != queries else attended
    return mesh_lib.manual_over_rest(function, (queries, keys, keys, scores, P()), queries)


def jax_takes_wide_heads() -> bool:
    """Returns whether JAX hands cuDNN heads of more than `NARROW` dims: it asks this host's GPU, also for absent ones."""
    found = mesh_lib.capability()
    return found is not None and found >= _HOPPER


def _sees_a_key(mask: jax.Array, queries: int, window: int) -> jax.Array:
    """Returns bool[B, T]: whether a causal query sees any key of a mask bool[B, S] or bool[B, T, S], with T = S."""
    distance_TS = jnp.arange(queries)[:, None] - jnp.arange(queries)
    seen_TS = (distance_TS >= 0) & (distance_TS < (window or queries))
    return jnp.any(seen_TS & (mask[:, None] if mask.ndim == 2 else mask), axis=-1)


def splash(
    q_BTHN: jax.Array, k_BSKN: jax.Array, v_BSKN: jax.Array, *, scale: float | None = None, interpret: bool = False
) -> jax.Array:
    """Returns causal attention by the Pallas kernel for TPUs that JAX ships; `interpret` runs it on any device, slowly."""
    from jax.experimental.pallas.ops.tpu import splash_attention as lib  # takes long to import, and only TPUs need it

    (length, heads), head_dim = q_BTHN.shape[1:3], q_BTHN.shape[3]
    block = next(size for size in _BLOCKS if length % size == 0)
    sizes: dict[str, Any] = dict.fromkeys(
        ("block_q", "block_kv", "block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq"), block
    )
    kernel = lib.make_splash_mha(
        lib.MultiHeadMask([lib.CausalMask((length, length))] * heads),
        block_sizes=lib.BlockSizes(**sizes),
        head_shards=1,
        q_seq_shards=1,
        interpret=interpret,
    )
    scaled = q_BTHN * jnp.asarray(head_dim**-0.5 if scale is None else scale, q_BTHN.dtype)
    heads_first = [jnp.swapaxes(x, 1, 2) for x in (scaled, k_BSKN, v_BSKN)]
    return jnp.swapaxes(jax.vmap(kernel)(*heads_first), 1, 2).astype(q_BTHN.dtype)


def _splash_can_run(q_BTHN: jax.Array, k_BSKN: jax.Array) -> bool:
    """Returns whether the arrays are one device's, since XLA does not shard Pallas kernels, and of lengths that the kernel takes."""
    mesh = jax.sharding.get_abstract_mesh()
    is_local = jax.device_count() == 1 if mesh.empty else set(mesh.manual_axes) == set(mesh.axis_names)
    return is_local and q_BTHN.shape[1] == k_BSKN.shape[1] and q_BTHN.shape[1] % LANES == 0


def choose_kernel(
    attention: str,
    known: Sequence[str],
    platform: str,
    compute_dtype: DTypeLike,
    length: int | None = None,
    *,
    head_dim: int | None = None,
    capability: float | None = None,
) -> Kernel:
    """Returns the kernel to run. "auto" takes, in 16-bit arithmetic, cuDNN's on GPUs and splash on TPUs, and XLA's elsewhere, and where
    cuDNN's does not take the model's heads.

    Args:
      attention: "auto", or a kernel.
      known: the kernels that the model family supports.
      platform: of the devices, as returned by `mesh.platform`.
      compute_dtype: the dtype of the matmuls.
      length: positions of a sequence in training; None: not known.
      head_dim: of the model's heads; None: not known.
      capability: the GPUs' compute capability (`mesh.capability`); None: not known.

    Raises:
      UserError: the wanted kernel cannot run.
    """
    if attention not in ("auto", *known):
        raise UserError(
            f"attention: this preset supports only {' and '.join(known)}, and the config sets {attention}; "
            "set `attention=auto`"
        )
    can_cudnn = "cudnn" in known and platform == "gpu" and compute_dtype != jnp.float32
    if attention == "cudnn" and not can_cudnn:
        raise UserError(
            f"attention: cudnn needs an NVIDIA GPU and 16-bit arithmetic; this run has {platform} and "
            f"{jnp.dtype(compute_dtype).name}; set `attention=xla`"
        )
    widest = WIDEST if capability is None or capability >= _HOPPER else NARROW
    takes_heads = head_dim is None or (head_dim <= widest and head_dim % 8 == 0)
    if attention == "cudnn" and not takes_heads:
        raise UserError(
            f"attention: cudnn takes heads of a multiple of 8 dims, at most {widest} on these GPUs, and this model's have {head_dim}; "
            "set `attention=xla`"
        )
    can_cudnn &= takes_heads
    can_splash = "splash" in known and platform == "tpu" and compute_dtype == jnp.bfloat16 and not (length or 0) % LANES
    if attention == "splash" and not can_splash:
        raise UserError(
            f"attention: splash needs a TPU, bfloat16 arithmetic and a multiple of {LANES} positions; this run has "
            f"{platform}, {jnp.dtype(compute_dtype).name} and seq_len={length}; set `attention=xla`"
        )
    choices: tuple[tuple[Kernel, bool], ...] = (("cudnn", can_cudnn), ("splash", can_splash))
    return next((kernel for kernel, can_run in choices if can_run and attention in ("auto", kernel)), "xla")
