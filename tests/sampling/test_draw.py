"""The draw: keyed by seed and position alone, in proportion to the weights, blind to batch-mates."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.sampling import lanes
from jaxserve.sampling.draw import draw, pick, uniforms
from tests.sampling.rows import chi_square_fits

SIZES = [1, 33, 100, 3001]


def drawn(weights: np.ndarray, seed: int, positions: np.ndarray) -> np.ndarray:
    rows = np.broadcast_to(weights, (len(positions), weights.shape[-1])).astype(np.float32)
    seeds = jnp.full((len(positions), 2), seed, jnp.uint32)

    @jax.jit
    def run(rows):
        return draw(lanes.spread(rows, 0), seeds, jnp.asarray(positions, jnp.int32), rows.shape[1])

    return np.asarray(run(rows))


def test_uniforms_are_threefry_of_seed_and_position():
    """The known answer of Threefry-2x32 with 20 rounds for a zero key and counter: 6b200159 99ba4efe."""
    got = uniforms(jnp.zeros((1, 2), jnp.uint32), jnp.zeros(1, jnp.int32))
    np.testing.assert_array_equal(got[0], np.float32([0x6B2001, 0x99BA4E]) / 2**24)


def test_uniforms_are_even_and_independent():
    positions = jnp.arange(20_000, dtype=jnp.int32)
    u = np.asarray(uniforms(jnp.full((20_000, 2), 5, jnp.uint32), positions))
    assert u.min() >= 0
    assert u.max() < 1
    cells = np.floor(u * 10).astype(int)
    assert chi_square_fits(np.bincount(cells[:, 0] * 10 + cells[:, 1], minlength=100), np.full(100, 0.01))
    assert chi_square_fits(np.bincount(cells[:-1, 0] * 10 + cells[1:, 0], minlength=100), np.full(100, 0.01))


def test_each_half_of_the_seed_and_the_position_matter():
    seeds = jnp.asarray([[0, 0], [1, 0], [0, 1], [0, 0]], jnp.uint32)
    u = np.asarray(uniforms(seeds, jnp.asarray([0, 0, 0, 1], jnp.int32)))
    assert len({tuple(row) for row in u}) == 4


@pytest.mark.parametrize("size", SIZES)
def test_draws_follow_the_weights(size):
    weights = np.random.default_rng(size).exponential(size=size) ** 3
    tokens = drawn(weights, 1, np.arange(10_000))
    assert chi_square_fits(np.bincount(tokens, minlength=size), weights / weights.sum())


@pytest.mark.parametrize("size", SIZES)
def test_a_single_possible_token_is_drawn_wherever_it_is(size):
    tokens = np.unique(np.linspace(0, size - 1, 40).astype(int))
    rows = np.eye(size, dtype=np.float32)[tokens] * np.float32(1e-30)
    np.testing.assert_array_equal(drawn(rows, 3, np.arange(len(tokens))), tokens)


def test_weight_zero_is_never_drawn():
    weights = np.where(np.arange(3001) % 3 == 1, np.random.default_rng(0).random(3001), 0)
    assert np.all(drawn(weights, 2, np.arange(10_000)) % 3 == 1)


@pytest.mark.parametrize("chance", [0.0, 0.5, 1 - 2**-24])
def test_pick_at_the_ends_of_the_range(chance):
    rng = np.random.default_rng(1)
    weights = np.where(rng.random((200, 300)) < 0.5, 0, rng.exponential(size=(200, 300)) ** 4).astype(np.float32)
    got = np.asarray(pick(jnp.asarray(weights), jnp.full(200, chance)))
    share = np.cumsum(weights.astype(np.float64), 1) / weights.astype(np.float64).sum(1, keepdims=True)
    rows = np.arange(200)
    assert np.all(weights[rows, got] > 0)
    assert np.all(share[rows, got] >= chance - 1e-6)
    assert np.all(share[rows, got] - weights[rows, got] / weights.sum(1) <= chance + 1e-6)


def test_a_row_of_zeros_gives_a_token():
    assert drawn(np.zeros(100), 0, np.arange(3)).tolist() == [0, 0, 0]


def test_rare_tokens_get_their_share():
    """Half of the mass in 4,000 tokens that are each 4,000 times less likely than the other one."""
    weights = np.full(4001, 1 / 4000)
    weights[0] = 1
    tokens = drawn(weights, 4, np.arange(4000))
    assert chi_square_fits(np.bincount(np.minimum(tokens, 1), minlength=2), np.array([0.5, 0.5]))
    cells = np.bincount((tokens[tokens > 0] - 1) // 200, minlength=20)
    assert chi_square_fits(cells, np.full(20, 1 / 20))
