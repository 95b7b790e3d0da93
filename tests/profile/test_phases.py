import itertools

import hypothesis
import hypothesis.strategies as st
import pytest

from zerojax.profile import phases

# Integers, so that an interval is a set of unit cells and every sum is exact.
interval = st.tuples(st.integers(0, 40), st.integers(0, 40)).map(sorted).map(tuple)
intervals = st.lists(interval, max_size=12)
kernels = st.dictionaries(st.sampled_from(phases.PHASES), intervals)


def cells(found):
    return {cell for start, end in found for cell in range(start, end)}


@hypothesis.given(intervals)
def test_a_union_has_the_same_moments_once_and_in_order(given):
    found = phases.union(given)
    assert cells(found) == cells(given) and phases.length(found) == len(cells(given))
    assert all(start < end for start, end in found)
    assert all(before[1] < after[0] for before, after in itertools.pairwise(found))


@hypothesis.given(intervals, intervals)
def test_a_difference_is_that_of_sets(given, others):
    found = phases.subtract(phases.union(given), phases.union(others))
    assert cells(found) == cells(given) - cells(others) and phases.length(found) == len(cells(given) - cells(others))


@hypothesis.given(intervals, intervals)
def test_owned_time_runs_alone_and_hidden_time_beside_others(given, others):
    share = phases.beside(given, phases.union(others))
    assert share == phases.Share(len(cells(given) - cells(others)), len(cells(given) & cells(others)), len(given))


@hypothesis.given(kernels)
def test_the_shares_add_up_to_the_time_from_the_first_kernel_to_the_last(given):
    shares = phases.divide(given)
    everything = [pair for found in given.values() for pair in found]
    if not everything:
        assert shares == {}
        return
    total = max(end for _, end in everything) - min(start for start, _ in everything)
    assert sum(share.owned for share in shares.values()) == total
    assert shares[phases.IDLE].owned == total - len(cells(everything))
    assert list(shares) == [*phases.PHASES, phases.IDLE]


@hypothesis.given(kernels)
def test_collectives_own_the_time_that_no_computing_kernel_covers(given):
    computing = cells([pair for name in phases.COMPUTE for pair in given.get(name, ())])
    sending = cells(given.get(phases.COLLECTIVES, ()))
    shares = phases.divide(given)
    if shares:
        assert shares[phases.COLLECTIVES].owned == len(sending - computing)
        assert shares[phases.COLLECTIVES].hidden == len(sending & computing)
        copies = cells(given.get(phases.COPIES, ()))
        assert shares[phases.COPIES].owned == len(copies - computing - sending)


LAYER = "jit(train_step)/gradients/jvp(Llama.hidden)/layer_0/layer_0.run/layer_0/"


@pytest.mark.parametrize(
    "kernel, work, op_name, expected",
    [
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "", "", phases.COLLECTIVES),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL", "async-start", "jit(train_step)/update/add", phases.COLLECTIVES),
        ("MemcpyP2P", "", "", phases.COLLECTIVES),
        ("MemcpyD2D", "all-gather-start", LAYER + "sharding_constraint", phases.COLLECTIVES),
        ("MemcpyD2D", "elementwise", "jit(train_step)/gradients/jvp(loss)/shard_map/while", phases.COPIES),
        ("wrapped_transpose_3", "elementwise", LAYER + "attention/o/dot_general", phases.COPIES),
        ("transpose_copy_fusion.25", "elementwise", "", phases.COPIES),
        ("input_transpose_fusion", "", "", phases.COPIES),
        ("loop_transpose_add_fusion", "elementwise", "", phases.OTHER),
        ("nvjet_tst_192x192_64x4_2x1_v_bz_coopB_NNT", "matmul", LAYER + "mlp/up/dot_general", phases.MATMULS),
        ("nvjet_tst_192x192_64x4_2x1_v_bz_coopB_NNT", "", "", phases.MATMULS),
        ("grouped_rows_mosaic_gpu_kernel", "", "", phases.MATMULS),
        ("gemm_fusion_dot_3_0", "matmul", LAYER + "attention/q/dot_general", phases.MATMULS),
        ("gemm_fusion_dot_3_0", "matmul", "jit(f)/gradients/jvp(loss)/shard_map/while/body/dot_general", phases.LOSS),
        ("loop_add_fusion", "elementwise", "jit(f)/gradients/transpose(jvp(loss))/mul", phases.LOSS),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16", "attention", LAYER + "attention/attention/x", phases.ATTENTION),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16", "", "", phases.ATTENTION),
        ("convolve_dot_do_o", "attention", "", phases.ATTENTION),
        ("dot_fusion", "matmul", LAYER + "attention/attention/BTNH,BSNH->BNTS/dot_general", phases.ATTENTION),
        ("loop_multiply_fusion", "elementwise", "jit(train_step)/update/mul;jit(train_step)", phases.OPTIMIZER),
        ("input_reduce_fusion", "elementwise", "jit(train_step)/(clip/reduce_sum:gradients/add)", phases.OPTIMIZER),
        ("loop_multiply_fusion", "elementwise", LAYER + "mlp/update/mul", phases.OTHER),  # a module of that name
        ("input_reduce_fusion", "elementwise", LAYER + "mlp_norm/reduce_sum", phases.OTHER),
        ("loop_add_fusion", "", "", phases.OTHER),
    ],
)  # fmt: skip
def test_a_kernel_belongs_to_the_phase_of_its_kind_and_scope(kernel, work, op_name, expected):
    assert phases.phase(kernel, work, op_name) == expected
