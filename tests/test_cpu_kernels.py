"""The trunk on oneDNN against the plain Paddle layers, on random non-zero input."""

import os

import numpy as np
import paddle
import pytest

import onednn
from atari_model import AtariModel
from cpu_kernels import MAX_PLANS, SLICE, CpuTrunk, best_precision, unavailable_reason

PRECISIONS = [
    pytest.param(name, marks=pytest.mark.skipif(unavailable_reason(name) is not None, reason=f"no {name} here"))
    for name in ("fp32", "bf16")
]
# Largest error allowed, as a share of the Euclidean norm. bf16 keeps 8 bits of each number: features err by 0.005
# (0.05 if a bias is forgotten), and gradients by 0.1, as units near zero end on the other side of the ReLU.
TOLERANCE = {"fp32": 1e-4, "bf16": 0.02}
GRADIENT_TOLERANCE = {"fp32": 1e-4, "bf16": 0.15}


ENV_DIM = 44  # small frames where the size does not matter: orthogonal weights of full ones take 0.5 s


@pytest.fixture
def model():
    return _model(ENV_DIM)


@pytest.fixture
def full_model():
    return _model(84)


def _model(env_dim: int) -> AtariModel:
    paddle.seed(0)
    model = AtariModel(action_num=6, env_dim=env_dim)
    for parameter in _parameters(model)[1::2]:  # a bias of zero would hide that it is forgotten
        parameter.set_value(0.1 * paddle.randn(parameter.shape))
    model.normalize_observations(255 * np.random.default_rng(1).random((env_dim, env_dim)), std=70.0)
    return model


def _parameters(model: AtariModel) -> list[paddle.Tensor]:
    return [parameter for layer in (*model.convolutions, model.fc) for parameter in (layer.weight, layer.bias)]


def _trunk(model: AtariModel, **settings: object) -> CpuTrunk:
    return CpuTrunk(_parameters(model), model.obs_mean, model.obs_std, **settings)


def _random_obs(rng: np.random.Generator, batch: int, env_dim: int = ENV_DIM) -> np.ndarray:
    return rng.integers(1, 256, (batch, 4, env_dim, env_dim), dtype=np.uint8)


def _gradients(model: AtariModel, features: paddle.Tensor, weights: np.ndarray) -> list[np.ndarray]:
    """The parameters' gradients of the sum of `features` times `weights`, float32 [B, 512] both."""
    (features * paddle.to_tensor(weights)).sum().backward()
    gradients = [parameter.grad.numpy().copy() for parameter in _parameters(model)]
    model.clear_gradients()
    return gradients


def _error(actual: np.ndarray, expected: np.ndarray) -> float:
    assert actual.shape == expected.shape
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))


def _assert_equals_plain_layers(
    model: AtariModel, trunk: CpuTrunk, obs: np.ndarray, rng: np.random.Generator, precision: str = "fp32"
) -> None:
    weights = rng.normal(size=(len(obs), 512)).astype(np.float32)
    plain = model._features(paddle.to_tensor(obs))
    features = trunk.features(obs)
    assert _error(features.numpy(), plain.numpy()) < TOLERANCE[precision]
    assert _error(trunk.infer(obs), plain.numpy()) < TOLERANCE[precision]
    expected = _gradients(model, plain, weights)
    for actual, wanted in zip(_gradients(model, features, weights), expected, strict=True):
        assert _error(actual, wanted) < GRADIENT_TOLERANCE[precision]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("batch", [1, 5, 16, 80])
def test_features_and_gradients_equal_those_of_the_plain_layers(full_model, rng, batch, precision):
    trunk = _trunk(full_model, precision=precision)
    _assert_equals_plain_layers(full_model, trunk, _random_obs(rng, batch, 84), rng, precision)


@pytest.mark.parametrize("env_dim", [36, 40, 64])
def test_other_frame_sizes_equal_the_plain_layers(rng, env_dim):
    model = _model(env_dim)
    trunk = _trunk(model)
    _assert_equals_plain_layers(model, trunk, _random_obs(rng, 3, env_dim), rng)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_activations_kept_while_acting_give_the_gradients_of_the_whole_batch(full_model, rng, precision):
    trunk = _trunk(full_model, precision=precision, train_threads=2)
    obs, weights = _random_obs(rng, 12, 84), rng.normal(size=(12, 512)).astype(np.float32)
    batch_obs = np.empty_like(obs)
    trunk.keep_for(batch_obs)
    for start in (8, 0, 4):  # actors take turns, so parts come in any order
        batch_obs[start : start + 4] = obs[start : start + 4]
        trunk.infer(batch_obs[start : start + 4])
    trunk.infer(_random_obs(rng, 4, 84))  # not of the batch, as the bootstrap observations are not
    trunk.training_plan(12)._forward = None  # a second forward pass would fail
    features = trunk.features(batch_obs)
    plain = full_model._features(paddle.to_tensor(obs))
    assert _error(features.numpy(), plain.numpy()) < TOLERANCE[precision]
    expected = _gradients(full_model, plain, weights)
    for actual, wanted in zip(_gradients(full_model, features, weights), expected, strict=True):
        assert _error(actual, wanted) < GRADIENT_TOLERANCE[precision]


def test_kept_activations_are_not_used_after_an_update_nor_where_a_part_is_missing(model, rng):
    trunk = _trunk(model)
    obs = _random_obs(rng, 6)
    trunk.keep_for(obs)
    trunk.infer(obs[:3])
    _assert_equals_plain_layers(model, trunk, obs, rng)  # the second half was never inferred
    trunk.keep_for(obs)
    trunk.infer(obs)
    for parameter in _parameters(model):
        parameter.set_value(parameter * 1.5)
    trunk.refresh()
    _assert_equals_plain_layers(model, trunk, obs, rng)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_results_follow_the_optimizer_after_refresh(full_model, rng, precision):
    trunk = _trunk(full_model, precision=precision)
    optimizer = paddle.optimizer.Adam(1e-3, parameters=full_model.parameters(), use_multi_tensor=True)
    obs = _random_obs(rng, 5, 84)
    before = trunk.infer(obs)
    for _ in range(3):
        (-trunk.features(obs).mean()).backward()  # features grow: shut by the ReLU they would show nothing
        optimizer.step()
        optimizer.clear_grad()
        trunk.refresh()
    assert _error(trunk.infer(obs), before) > 0.1
    _assert_equals_plain_layers(full_model, trunk, obs, rng, precision)


def test_results_follow_loaded_weights_after_refresh(model, rng):
    trunk = _trunk(model)
    obs = _random_obs(rng, 5)
    trunk.infer(obs)
    other_weights = {name: 1.5 * value for name, value in model.state_dict().items()}
    model.set_state_dict(other_weights)
    trunk.refresh()
    _assert_equals_plain_layers(model, trunk, obs, rng)


def test_observations_need_not_be_contiguous(model, rng):
    trunk = _trunk(model)
    obs = _random_obs(rng, 8)[::2, :, ::-1]
    _assert_equals_plain_layers(model, trunk, obs, rng)


def test_two_batch_sizes_may_be_pending_at_once(model, rng):
    trunk = _trunk(model)
    obs = _random_obs(rng, 8)
    weights = rng.normal(size=(8, 512)).astype(np.float32)
    first, second = trunk.features(obs[:3]), trunk.features(obs[3:])
    parts = zip(_gradients(model, first, weights[:3]), _gradients(model, second, weights[3:]), strict=True)
    whole = _gradients(model, trunk.features(obs), weights)
    assert all(_error(one + other, both) < 1e-4 for (one, other), both in zip(parts, whole, strict=True))


@pytest.mark.parametrize("disturb", ["features", "refresh"])
def test_backward_refuses_activations_that_are_gone(model, rng, disturb):
    trunk = _trunk(model)
    obs = _random_obs(rng, 3)
    features = trunk.features(obs)
    trunk.features(obs) if disturb == "features" else trunk.refresh()
    # We raise RuntimeError; Paddle passes on what a PyLayer raises as OSError.
    with pytest.raises((RuntimeError, OSError), match="ran between forward and backward"):
        features.sum().backward()


def test_inference_does_not_disturb_a_pending_backward(model, rng):
    trunk = _trunk(model)
    obs = _random_obs(rng, 3)
    weights = np.ones((3, 512), np.float32)
    expected = _gradients(model, trunk.features(obs), weights)
    features = trunk.features(obs)
    trunk.infer(_random_obs(rng, 3))
    actual = _gradients(model, features, weights)
    assert all(np.array_equal(one, other) for one, other in zip(actual, expected, strict=True))


@pytest.mark.parametrize("threads", [1, 2])
def test_bits_repeat_from_run_to_run(model, rng, threads):
    obs, weights = _random_obs(rng, 40), rng.normal(size=(40, 512)).astype(np.float32)
    runs = [
        _gradients(model, trunk.features(obs), weights)
        for trunk in (_trunk(model, train_threads=threads) for _ in range(3))
    ]
    for run in runs[1:]:
        assert all(np.array_equal(one, other) for one, other in zip(run, runs[0], strict=True))


def test_inference_has_the_same_bits_whatever_the_learner_uses(model, rng):
    obs = _random_obs(rng, 40)
    results = []
    for threads in (1, 2, 3):
        trunk = _trunk(model, train_threads=threads)
        trunk.features(obs).sum().backward()
        results.append(trunk.infer(obs))
    assert np.array_equal(results[0], results[1]) and np.array_equal(results[0], results[2])


@pytest.mark.parametrize("threads", [2, 3])
def test_gradients_of_more_threads_equal_the_plain_layers(model, rng, threads):
    trunk = _trunk(model, train_threads=threads)
    _assert_equals_plain_layers(model, trunk, _random_obs(rng, SLICE * threads + 1), rng)


def test_thread_count_is_restored_after_use(model, rng):
    trunk = _trunk(model, train_threads=2)
    runtime = onednn._openmp_runtimes()[-1]
    before = runtime.omp_get_max_threads()
    trunk.features(_random_obs(rng, 1)).sum().backward()
    assert runtime.omp_get_max_threads() == before


def test_old_batch_sizes_are_forgotten(model, rng):
    trunk = _trunk(model)
    for batch in range(1, MAX_PLANS + 3):
        trunk.infer(_random_obs(rng, batch))
        trunk.features(_random_obs(rng, batch))
    assert list(trunk._inference_plans) == list(trunk._training_plans) == [3, 4, 5, 6]


def _resident_mb() -> float:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


@pytest.mark.parametrize("updates", [300, pytest.param(10_000, marks=pytest.mark.slow)])
def test_updates_do_not_leak(full_model, rng, updates):
    trunk = _trunk(full_model)
    optimizer = paddle.optimizer.Adam(1e-4, parameters=full_model.parameters(), use_multi_tensor=True)

    def update(count: int) -> None:
        for _ in range(count):
            trunk.features(_random_obs(rng, 4, 84)).square().mean().backward()
            optimizer.step()
            optimizer.clear_grad()
            trunk.refresh()
            trunk.infer(_random_obs(rng, 2, 84))

    update(50)
    before = _resident_mb()
    update(updates)
    # One update's gradients take 6.7 MB, one plan's activations 0.5 MB: a leak of either would show.
    assert _resident_mb() - before < 30


def test_making_and_forgetting_plans_does_not_leak(model, rng):
    trunk = _trunk(model)

    def use_many_batch_sizes() -> None:
        for batch in range(1, MAX_PLANS + 6):
            trunk.features(_random_obs(rng, batch)).sum().backward()
            model.clear_gradients()

    use_many_batch_sizes()
    before = _resident_mb()
    for _ in range(5):
        use_many_batch_sizes()
    assert _resident_mb() - before < 30


def test_a_new_normalization_reaches_kernels_that_are_in_use(model, rng):
    trunk, obs = _trunk(model), _random_obs(rng, 5)
    before = trunk.infer(obs)
    model.normalize_observations(255 * rng.random((ENV_DIM, ENV_DIM)), std=30.0)
    trunk.refresh()
    assert _error(trunk.infer(obs), before) > 0.1
    _assert_equals_plain_layers(model, trunk, obs, rng)


def test_a_normalization_of_another_size_or_without_spread_is_refused(model):
    with pytest.raises(ValueError, match=r"mean is \[84, 84\] and std 4.0, not \[44, 44\]"):
        model.normalize_observations(np.zeros((84, 84)), std=4.0)
    with pytest.raises(ValueError, match="std 0.0"):
        model.normalize_observations(np.zeros((ENV_DIM, ENV_DIM)), std=0.0)


def test_wrong_arguments_are_named(model, rng):
    trunk = _trunk(model)
    with pytest.raises(ValueError, match=r"float64 \[2, 4, 84, 84\], not uint8"):
        trunk.infer(np.zeros((2, 4, 84, 84)))
    with pytest.raises(ValueError, match=r"uint8 \[2, 4, 64, 64\]"):
        trunk.features(_random_obs(rng, 2, 64))
    with pytest.raises(ValueError, match="env_dim is 82"):
        CpuTrunk(_parameters(model), paddle.zeros([82, 82]), model.obs_std)
    with pytest.raises(ValueError, match="parameters have"):
        CpuTrunk(_parameters(model)[::-1], model.obs_mean, model.obs_std)
    with pytest.raises(ValueError, match="'fp16'"):
        unavailable_reason("fp16")


def test_library_errors_name_function_and_status():
    with pytest.raises(RuntimeError, match="dnnl_memory_desc_create_with_strides failed with status 2"):
        onednn.Descriptor.strided((-1,), onednn.F32, (1,))


def test_best_precision_is_available():
    assert unavailable_reason(best_precision()) is None
