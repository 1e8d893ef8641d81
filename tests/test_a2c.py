import numpy as np
import paddle
import pytest

from a2c import A2C, a2c_loss, clip_gradients
from a2c_config import A2CConfig, ConfigError
from atari_agent import create_agent, resolve_device
from atari_model import AtariModel

BATCH, ACTIONS = 7, 4


def random_batch(rng):
    return {
        "logits": rng.normal(size=(BATCH, ACTIONS)).astype(np.float32) * 2,
        "values": rng.normal(size=BATCH).astype(np.float32),
        "actions": rng.integers(0, ACTIONS, BATCH),
        "advantages": rng.normal(size=BATCH).astype(np.float32),
        "target_values": rng.normal(size=BATCH).astype(np.float32),
    }


def hand_derived(batch, vf_loss_coeff, entropy_coeff):
    """Loss and its gradients by logits and values, from the softmax's derivative, in float64."""
    logits, values = batch["logits"].astype(np.float64), batch["values"].astype(np.float64)
    advantages, targets = batch["advantages"].astype(np.float64), batch["target_values"].astype(np.float64)
    probs = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    log_probs = np.log(probs)
    taken = np.eye(ACTIONS)[batch["actions"]]
    entropies = -(probs * log_probs).sum(1, keepdims=True)
    loss = (
        -(advantages * log_probs[taken == 1]).mean()
        + vf_loss_coeff * ((values - targets) ** 2).mean()
        - entropy_coeff * entropies.mean()
    )
    by_logits = (advantages[:, None] * (probs - taken) + entropy_coeff * probs * (log_probs + entropies)) / BATCH
    by_values = vf_loss_coeff * 2 * (values - targets) / BATCH
    return loss, by_logits, by_values


def small_config(**settings):
    return A2CConfig(**{"actor_num": 1, "env_num": 2, "sample_batch_steps": 3, **settings})


def random_learning_batch(rng, size=6):
    return (
        rng.integers(0, 256, (size, 4, 44, 44), dtype=np.uint8),
        rng.integers(0, 6, size),
        rng.normal(size=size).astype(np.float32),
        rng.normal(size=size).astype(np.float32),
    )


def test_loss_and_gradients_equal_the_hand_derived_ones(rng):
    batch = random_batch(rng)
    tensors = {name: paddle.to_tensor(array) for name, array in batch.items()}
    tensors["logits"].stop_gradient = tensors["values"].stop_gradient = False
    losses = a2c_loss(**tensors, vf_loss_coeff=0.7, entropy_coeff=0.3)
    losses.loss.backward()
    loss, by_logits, by_values = hand_derived(batch, 0.7, 0.3)
    assert losses.loss.item() == pytest.approx(loss, rel=1e-5)
    np.testing.assert_allclose(tensors["logits"].grad.numpy(), by_logits, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(tensors["values"].grad.numpy(), by_values, rtol=1e-4, atol=1e-6)


def test_entropy_of_a_uniform_policy_is_the_log_of_the_number_of_actions(rng):
    batch = random_batch(rng) | {"logits": np.full((BATCH, ACTIONS), 3.0, np.float32)}
    losses = a2c_loss(*(paddle.to_tensor(array) for array in batch.values()), 0.5, 0.01)
    assert losses.entropy.item() == pytest.approx(np.log(ACTIONS), rel=1e-6)


def test_loss_stays_finite_with_a_certain_policy(rng):
    batch = random_batch(rng)
    batch["logits"][:, 0] = 1000.0
    losses = a2c_loss(*(paddle.to_tensor(array) for array in batch.values()), 0.5, 0.01)
    assert np.isfinite(losses.loss.item())


def test_clipping_scales_the_global_norm_and_reports_the_norm_before():
    parameters = [paddle.create_parameter([1], "float32") for _ in range(2)]
    (3 * parameters[0] + 4 * parameters[1]).sum().backward()
    assert clip_gradients(parameters, 0.5) == pytest.approx(5.0)
    assert [parameter.grad.item() for parameter in parameters] == pytest.approx([0.3, 0.4])


def test_clipping_leaves_small_gradients_and_zero_means_no_clip():
    parameter = paddle.create_parameter([1], "float32")
    (3 * parameter).sum().backward()
    clip_gradients([parameter], 10.0)
    clip_gradients([parameter], 0.0)
    assert parameter.grad.item() == 3.0


def test_learning_rate_falls_linearly_to_zero():
    a2c = A2C(AtariModel(6), small_config(start_lr=0.1, max_sample_steps=1000))
    assert [a2c.learning_rate(steps) for steps in (0, 250, 1000, 1010)] == pytest.approx([0.1, 0.075, 0, 0])


@pytest.mark.parametrize(("decay", "expected"), [(True, [0.2, 0.15, 0, 0]), (False, [0.2] * 4)])
def test_the_entropy_bonus_falls_linearly_to_zero_unless_told_otherwise(decay, expected):
    a2c = A2C(AtariModel(6), small_config(entropy_coeff=0.2, entropy_decay=decay, max_sample_steps=1000))
    assert [a2c.entropy_coeff(steps) for steps in (0, 250, 1000, 1010)] == pytest.approx(expected)


def test_an_update_half_way_has_half_the_entropy_bonus(rng):
    obs, actions, _, targets = random_learning_batch(rng)

    def grad_norm(sample_steps, entropy_decay):  # of nothing but the bonus
        config = small_config(
            vf_loss_coeff=0, entropy_coeff=1, entropy_decay=entropy_decay, max_sample_steps=1000, precision="fp32"
        )
        paddle.seed(0)
        agent = create_agent(config, 6, "cpu")
        return agent.learn(obs, actions, np.zeros(len(actions), np.float32), targets, sample_steps)["grad_norm"]

    assert grad_norm(0, True) > 0
    assert grad_norm(500, True) == pytest.approx(grad_norm(0, True) / 2, rel=1e-4)
    assert grad_norm(500, False) == pytest.approx(grad_norm(0, True), rel=1e-4)


@pytest.mark.parametrize("optimizer", ["adam", "rmsprop"])
def test_learning_from_one_batch_raises_the_chance_of_good_actions(rng, optimizer):
    agent = create_agent(small_config(optimizer=optimizer, normalize_advantages=False), 6, "cpu")
    obs, actions, _, targets = random_learning_batch(rng)

    def log_prob():
        logits, _ = agent.alg.predict(obs)
        return (logits - np.log(np.exp(logits).sum(1, keepdims=True)))[np.arange(len(actions)), actions].mean()

    before = log_prob()
    for _ in range(3):
        losses = agent.learn(obs, actions, np.ones(len(actions), np.float32), targets, sample_steps=0)
    assert log_prob() > before
    assert losses["grad_norm"] > 0


def test_the_compiled_learner_of_a_gpu_learns_the_same_as_the_plain_one():
    weights, losses = [], []
    for compiled in (False, True):
        paddle.seed(0)
        a2c = A2C(AtariModel(6, env_dim=44), small_config(), compiled)  # on Paddle's own layers, as on a GPU
        rng = np.random.default_rng(0)
        obs = rng.integers(1, 256, (8, 4, 44, 44), dtype=np.uint8)
        batch = rng.integers(6, size=8), *rng.normal(size=(2, 8)).astype(np.float32)
        losses.append([a2c.learn(obs, *batch, sample_steps=0) for _ in range(3)])
        weights.append(a2c.model.get_weights())
    for plain, compiled in zip(*losses, strict=True):
        assert plain == pytest.approx(compiled, rel=1e-4)
    for name, plain in weights[0].items():
        np.testing.assert_allclose(plain, weights[1][name], atol=1e-5, err_msg=name)


def test_diverged_gradients_stop_the_run_and_leave_the_weights(rng):
    agent = create_agent(small_config(normalize_advantages=False), 6, "cpu")
    obs, actions, advantages, targets = random_learning_batch(rng)
    before = agent.get_weights()
    advantages[0] = np.inf
    with pytest.raises(FloatingPointError, match="start_lr"):
        agent.learn(obs, actions, advantages, targets, sample_steps=0)
    after = agent.get_weights()
    assert all((before[name] == after[name]).all() for name in before)


def test_same_seed_gives_the_same_weights_and_another_seed_gives_others():
    first, second, third = (create_agent(small_config(seed=seed), 6, "cpu").get_weights() for seed in (1, 1, 2))
    assert all((first[name] == second[name]).all() for name in first)
    assert any((first[name] != third[name]).any() for name in first)


def test_weights_travel_from_one_agent_to_another(rng):
    first, second = create_agent(small_config(seed=1), 6, "cpu"), create_agent(small_config(seed=2), 6, "cpu")
    obs = random_learning_batch(rng)[0]
    assert (first.value(obs) != second.value(obs)).any()
    second.set_weights(first.get_weights())
    np.testing.assert_array_equal(first.value(obs), second.value(obs))


@pytest.mark.parametrize("optimizer", ["adam", "rmsprop"])
def test_a_restored_agent_goes_on_as_if_nothing_had_happened(rng, optimizer):
    config = small_config(optimizer=optimizer)
    agent = create_agent(config, 6, "cpu")
    for step in range(2):
        agent.learn(*random_learning_batch(rng), sample_steps=step)
    state = agent.get_state()
    restored = create_agent(small_config(optimizer=optimizer, seed=9), 6, "cpu")
    restored.set_state(state)
    batch = random_learning_batch(rng)
    for each in (agent, restored):
        each.learn(*batch, sample_steps=2)
    for name, weights in agent.get_weights().items():
        np.testing.assert_array_equal(restored.get_weights()[name], weights)


def test_a_state_of_another_network_is_refused_with_its_name():
    agent = create_agent(small_config(), 6, "cpu")
    state = {"optimizer/lstm.weight/moment1_0": np.zeros(1, np.float32)}
    with pytest.raises(ValueError, match=r"lstm.weight/moment1_0"):
        agent.set_state(agent.get_state() | state)


def test_weights_of_another_shape_are_refused_with_their_name():
    agent = create_agent(small_config(), 6, "cpu")
    weights = agent.get_weights()
    with pytest.raises(ValueError, match="policy_head.weight"):
        agent.set_weights(weights | {"policy_head.weight": np.zeros((512, 4), np.float32)})
    del weights["fc.bias"]
    with pytest.raises(ValueError, match=r"fc\.bias"):
        agent.set_weights(weights)


def test_sampled_actions_follow_the_policy(rng):
    agent = create_agent(small_config(), 6, "cpu")
    weights = agent.get_weights()
    # The bias alone decides: action 2 has probability 0.75, the five others share the rest.
    bias = np.log(np.full(6, 0.05, np.float32))
    bias[2] = np.log(0.75)
    agent.set_weights(
        weights | {"policy_head.weight": 0 * weights["policy_head.weight"], "policy_head.bias": bias}
    )
    obs = rng.integers(0, 256, (50, 4, 44, 44), dtype=np.uint8)
    actions = np.concatenate([agent.sample(obs, rng)[0] for _ in range(20)])
    frequencies = np.bincount(actions, minlength=6) / len(actions)
    assert frequencies[2] == pytest.approx(0.75, abs=0.06)  # 4 standard deviations of 1,000 draws
    assert (frequencies[[0, 1, 3, 4, 5]] > 0).all()
    assert (agent.predict(obs) == 2).all()


def test_a_gpu_that_is_not_there_is_named_with_the_way_out():
    if paddle.is_compiled_with_cuda():
        pytest.skip("this Paddle is a GPU build")
    assert resolve_device("auto") == "cpu"
    with pytest.raises(ConfigError, match=r"gpu:0.*setup.sh --gpu"):
        resolve_device("gpu:0")
