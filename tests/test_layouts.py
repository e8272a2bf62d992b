"""Orders of gate and up: every conversion is a permutation that is known beforehand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_pallas import GateUp
from moe_pallas.interop import convert_gate_up, join_gate_up, split_gate_up

F, D = 4, 3
GATE = np.arange(1, F + 1)  # g_i = i + 1
UP = 10 * GATE  # u_i = 10 * (i + 1)
STACKED = np.concatenate([GATE, UP])
INTERLEAVED = np.array([1, 10, 2, 20, 3, 30, 4, 40])
ORDERS = {GateUp.STACKED: STACKED, GateUp.INTERLEAVED: INTERLEAVED}

# What a projection has along its 2F axis: name → (array made of the 2F numbers, that axis).
OPERANDS = {
    "weight": (lambda row: np.stack([row * 2.0**e for e in range(2)])[:, :, None] * np.arange(1, D + 1), -2),
    "bias": (lambda row: np.stack([row, row + 0.5]), -1),
    "column_scale": (lambda row: np.stack([row, row * 3]), -1),
    "transposed_weight": (lambda row: np.arange(1, D + 1)[:, None] * row, -1),
}
DTYPES = [np.dtype(np.float32), np.dtype(jnp.bfloat16), np.dtype(np.int8)]
XPS = pytest.mark.parametrize("xp", [np, jnp], ids=["numpy", "jax"])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("operand", OPERANDS)
@pytest.mark.parametrize("source", ORDERS)
@pytest.mark.parametrize("target", ORDERS)
@XPS
def test_g2_convert_gate_up_moves_every_operand_exactly(source, target, operand, dtype, xp):
    make, axis = OPERANDS[operand]
    array, expected = (xp.asarray(make(ORDERS[order]).astype(dtype)) for order in (source, target))

    converted = convert_gate_up(array, source, target, axis)
    back = convert_gate_up(converted, target, source, axis)

    assert isinstance(converted, np.ndarray if xp is np else jax.Array)
    assert converted.dtype == dtype
    np.testing.assert_array_equal(converted, expected)
    np.testing.assert_array_equal(back, array)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("operand", OPERANDS)
@XPS
def test_g2_split_and_join_are_inverse(order, operand, xp):
    make, axis = OPERANDS[operand]
    array = xp.asarray(make(ORDERS[order]).astype(np.float32))

    gate, up = split_gate_up(array, order, axis)
    joined = join_gate_up(gate, up, order, axis)

    # Every operand is linear in its row or shifts it by its own amount: F gate entries, then F up ones.
    expected = make(STACKED).astype(np.float32)
    np.testing.assert_array_equal(gate, np.take(expected, range(F), axis))
    np.testing.assert_array_equal(up, np.take(expected, range(F, 2 * F), axis))
    assert isinstance(joined, np.ndarray if xp is np else jax.Array)
    assert joined.dtype == array.dtype
    np.testing.assert_array_equal(joined, array)


def test_g2_even_columns_are_gate_and_odd_ones_up():
    gate, up = split_gate_up(INTERLEAVED, "interleaved", axis=-1)
    np.testing.assert_array_equal(gate, INTERLEAVED[::2])
    np.testing.assert_array_equal(up, INTERLEAVED[1::2])
    np.testing.assert_array_equal(convert_gate_up(INTERLEAVED, "interleaved", "stacked", axis=-1), STACKED)


def test_the_default_axis_is_that_of_the_rows_of_w13():
    w13 = np.arange(2 * 6 * 6).reshape(2, 6, 6)
    expected = w13[:, [0, 3, 1, 4, 2, 5], :]
    np.testing.assert_array_equal(convert_gate_up(w13, GateUp.STACKED, GateUp.INTERLEAVED), expected)
    gate, up = split_gate_up(w13, GateUp.STACKED)
    np.testing.assert_array_equal(join_gate_up(gate, up, GateUp.INTERLEAVED), expected)


def test_positive_and_negative_axes_agree():
    array = np.arange(2 * 4 * 3).reshape(2, 4, 3)
    for positive, negative in ((0, -3), (1, -2)):
        np.testing.assert_array_equal(
            convert_gate_up(array, "stacked", "interleaved", positive),
            convert_gate_up(array, "stacked", "interleaved", negative),
        )


def test_conversions_work_under_jit_and_on_views():
    array = np.arange(2 * 8 * 3, dtype=np.float32).reshape(2, 3, 8).swapaxes(1, 2)
    expected = array[:, [0, 4, 1, 5, 2, 6, 3, 7]]
    np.testing.assert_array_equal(convert_gate_up(array, "stacked", "interleaved"), expected)
    jitted = jax.jit(lambda w: convert_gate_up(w, "stacked", "interleaved"))(array)
    np.testing.assert_array_equal(jitted, expected)
    rejoined = jax.jit(lambda w: join_gate_up(*split_gate_up(w, "stacked"), "interleaved"))(array)
    np.testing.assert_array_equal(rejoined, expected)


@pytest.mark.parametrize("length", [1, 7])
@pytest.mark.parametrize("target", ORDERS)
def test_g2_odd_sizes_raise(length, target):
    array = np.zeros((2, length, 4))
    with pytest.raises(ValueError, match=f"can't be {length}, which is odd"):
        convert_gate_up(array, "stacked", target)
    with pytest.raises(ValueError, match="odd"):
        split_gate_up(array, target)


def test_an_axis_that_is_not_there_raises():
    bias = np.zeros(8)
    with pytest.raises(ValueError, match=r"no axis -2.*need axis=-1"):
        convert_gate_up(bias, "stacked", "interleaved")
    with pytest.raises(ValueError, match="no axis 1"):
        split_gate_up(bias, "stacked", 1)
    with pytest.raises(ValueError, match="no axis -2"):
        join_gate_up(bias, bias, "stacked")


def test_unequal_halves_raise_instead_of_broadcasting_or_promoting():
    with pytest.raises(ValueError, match=r"float64\[4, 3\] and up float64\[1, 3\]"):
        join_gate_up(np.zeros((4, 3)), np.zeros((1, 3)), "stacked")
    with pytest.raises(ValueError, match=r"gate float32.* up float64"):
        join_gate_up(np.zeros((4, 3), np.float32), np.zeros((4, 3)), "interleaved")


def test_an_unknown_order_raises():
    with pytest.raises(ValueError, match="up_gate"):
        convert_gate_up(np.zeros((4, 3)), "stacked", "up_gate")
