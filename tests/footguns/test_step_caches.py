"""Step caches skip blocks when little changed: a host decision per step, with residuals kept.

A graph has no place for either. So the residuals go in and out as values, the decision is an eager
break, and each way it can fall is a graph of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace

import diffusers
import pytest
import tiny
import torch
from diffusers.hooks import apply_first_block_cache, hooks
from pair import Pair

import dit_graphs
from dit_graphs.pipelines import step_caches
from dit_graphs.pipelines.attachments import state_guard
from dit_graphs.wrapping import runner_of

# where the tiny models' residuals change by about as much, so that both decisions occur
THRESHOLDS = {"flux": 0.7, "wan22": 0.42, "qwen-image": 1.1}


# before 0.41 diffusers itself raises in the first picture after a cache came to a used pipeline
OLD = not hasattr(hooks, "CacheContext")
finds_late_caches = pytest.mark.skipif(OLD, reason="this diffusers forgets a cache enabled late")


def _first_block(threshold: float) -> diffusers.FirstBlockCacheConfig:
    return diffusers.FirstBlockCacheConfig(threshold=threshold)


def _magnitude(steps: int = 12, threshold: float = 0.06) -> diffusers.MagCacheConfig:
    ratios = [1.0, *(0.98 - 0.01 * i for i in range(steps - 1))]
    return diffusers.MagCacheConfig(
        threshold=threshold, num_inference_steps=steps, mag_ratios=ratios
    )


def _enable(make: Callable[[], object]) -> Callable[[object], None]:
    """Each denoiser gets a config of its own: MagCache keeps state in it."""

    def enable(pipe: object) -> None:
        for module in tiny.denoisers(pipe):
            module.enable_cache(make())

    return enable


def _disable(pipe: object) -> None:
    for module in tiny.denoisers(pipe):
        module.disable_cache()


class Decisions:
    """What the plain pipeline's cache decided, call by call."""

    def __init__(self, pipe: object) -> None:
        self.computed: list[bool] = []
        module = tiny.denoisers(pipe)[0]
        blocks = module.blocks if hasattr(module, "blocks") else module.transformer_blocks
        self.hook = blocks[0]._diffusers_hook.hooks["fbc_leader_block_hook"]
        own = self.hook._should_compute_remaining_blocks

        def note(residual: torch.Tensor) -> bool:
            self.computed.append(own(residual))
            return self.computed[-1]

        self.hook._should_compute_remaining_blocks = note


def test_b55_first_block_cache_runs_from_one_graph_per_branch() -> None:
    """Both decisions, again and again, and each block that a decision skips is skipped."""
    pair = Pair("flux", prepare=_enable(lambda: _first_block(THRESHOLDS["flux"])))
    decided = Decisions(pair.plain)
    found = [pair.reasons_of(1, steps=12, seed=seed) for seed in range(5)]
    assert 15 <= decided.computed.count(False) <= 45  # of 60
    assert set().union(*found) == {"warming_up"}
    # plain, observed and compared; and one more where a first guess fell the other way
    assert sum(reasons.get("warming_up", 0) for reasons in found) <= 12
    assert found[-1] == found[-2] == {}
    assert pair.replays >= 45
    graphs = pair.component()["graphs"]
    # without a residual to compare with, the first step decides nothing
    assert sorted(graph["breaks"] for graph in graphs) == [0, 1, 1]
    skips, computes = sorted(graph["nbytes"] for graph in graphs if graph["breaks"])
    assert skips < 0.7 * computes
    assert pair.component()["invalidations"] == 0


@pytest.mark.parametrize("name", ["wan22", "qwen-image"])
def test_b55_each_branch_of_guidance_keeps_residuals_of_its_own(name: str) -> None:
    """cond and uncond alternate on one graph; what they keep must not mix."""
    pair = Pair(name, prepare=_enable(lambda: _first_block(THRESHOLDS[name])))
    decided = Decisions(pair.plain)
    for seed in range(3):
        assert set(pair.reasons_of(1, steps=8, seed=seed)) <= {"warming_up"}
    components = dit_graphs.stats(pair.fast)["components"]
    assert sum(part["replays"] for part in components.values()) >= 16
    assert {True, False} <= set(decided.computed)


def test_b55_sizes_in_turn_a_cancelled_run_and_a_failed_one() -> None:
    """State of the last run, of another shape or half a run old, must be what plain makes of it."""
    pair = Pair("flux", prepare=_enable(lambda: _first_block(THRESHOLDS["flux"])))

    def stop(pipe: object, step: int, *rest: object) -> dict:
        pipe._interrupt = step >= 2
        return rest[-1]

    def fail(pipe: object, step: int, *rest: object) -> dict:
        if step == 3:
            raise RuntimeError("in the loop")
        return rest[-1]

    for seed in range(2):
        for size in (32, 48, 32):
            pair.latents(size=size, steps=8, seed=seed)
        pair.latents(steps=8, seed=seed, callback_on_step_end=stop)
        for pipe in (pair.fast, pair.plain):
            with pytest.raises(RuntimeError, match="in the loop"):
                pair.call(pipe, steps=8, seed=seed, callback_on_step_end=fail)
        pair.latents(steps=8, seed=seed)
    assert pair.replays >= 40


@pytest.mark.parametrize("make", [lambda: _first_block(THRESHOLDS["flux"]), _magnitude])
def test_b55_a_forward_that_raises_leaves_what_plain_leaves(make: Callable[[], object]) -> None:
    """Half a forward has written half the state; the next run starts from it, as plain does."""
    pair = Pair("flux", prepare=_enable(make))

    def arm(pipe: object, bombs: int = 1) -> None:
        layer = pipe.transformer.norm_out.linear
        calls = iter([False] * 6 + [True] * bombs)

        def bomb(module: object, given: object) -> None:
            if next(calls, False):
                raise ValueError("in a block")

        pipe.bomb = layer.register_forward_pre_hook(bomb)

    for seed in range(3):
        pair.latents(steps=12, seed=seed)
        pair.both(arm)
        for pipe in (pair.fast, pair.plain):
            with pytest.raises(ValueError, match="in a block"):
                pair.call(pipe, steps=12, seed=seed)
            pipe.bomb.remove()
        pair.latents(steps=12, seed=seed)
    assert pair.replays >= 24


@finds_late_caches
def test_b55_switched_on_and_off_between_graphs() -> None:
    """Enabled after graphs existed, enabled past `enable_cache`, at another threshold, disabled."""
    pair = Pair("flux")
    plain = pair.latents(steps=8)
    pair.both(_enable(lambda: _first_block(THRESHOLDS["flux"])))
    for seed in range(4):
        cached = pair.latents(steps=8, seed=seed)
    assert pair.reasons_of(1, steps=8, seed=3) == {}
    pair.both(lambda pipe: setattr(Decisions(pipe).hook, "threshold", 0.0))
    assert not torch.equal(pair.latents(steps=8, seed=3), cached)
    pair.both(_disable)
    assert torch.equal(pair.latents(steps=8), plain)
    config = _first_block(THRESHOLDS["flux"])
    pair.both(lambda pipe: apply_first_block_cache(pipe.transformer, config))
    for _ in range(3):
        assert torch.equal(pair.latents(steps=8, seed=3), cached)


@pytest.mark.parametrize(
    "config",
    [
        {"capture": "first_use"},
        {"verify": False},
        {"max_graphs": 2},
        pytest.param({"backend": "debug"}, marks=pytest.mark.slow),
        pytest.param({"verify": "always"}, marks=pytest.mark.slow),
        pytest.param({"backend": "auto"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_b55_whatever_the_config_the_latents_are_plain(config: dict[str, object]) -> None:
    pair = Pair("flux", prepare=_enable(lambda: _first_block(THRESHOLDS["flux"])), **config)
    for seed in range(3):
        pair.latents(steps=8, seed=seed)
    serves = config.get("verify") != "always" and config.get("backend") != "auto"
    assert (pair.replays > 0) is serves


@pytest.mark.parametrize("name", ["flux", "wan"])
def test_b55_mag_cache_runs_from_one_graph_per_branch(name: str) -> None:
    """Its decision needs host numbers only: it is known before the call."""
    pair = Pair(name, prepare=_enable(_magnitude))
    for seed in range(3):
        assert set(pair.reasons_of(1, steps=12, seed=seed)) <= {"warming_up"}
    before = pair.replays
    assert pair.reasons_of(1, steps=12, seed=5) == {}
    assert pair.replays - before >= 12
    sizes = {graph["nbytes"] for graph in pair.component()["graphs"]}
    assert min(sizes) < 0.7 * max(sizes), "one of the graphs skips blocks"
    # half a run, then a whole one: the counter of steps stands where plain's stands
    pair.latents(steps=5)
    pair.latents(steps=12)


_EAGER: dict[str, tuple[str, Callable[[object], object]]] = {
    "TaylorSeer": (
        "flux",
        lambda pipe: pipe.transformer.enable_cache(
            diffusers.TaylorSeerCacheConfig(cache_interval=2)
        ),
    ),
    "MagCache that calibrates": (
        "flux",
        lambda pipe: pipe.transformer.enable_cache(
            diffusers.MagCacheConfig(calibrate=True, num_inference_steps=4)
        ),
    ),
    "PAB": (
        "wan",
        lambda pipe: pipe.transformer.enable_cache(
            diffusers.PyramidAttentionBroadcastConfig(
                spatial_attention_block_skip_range=2,
                spatial_attention_timestep_skip_range=(0, 1000),
                spatial_attention_block_identifiers=("blocks",),
                current_timestep_callback=lambda: pipe.current_timestep,
            )
        ),
    ),
}


@pytest.mark.parametrize("kind", _EAGER)
def test_b55_other_caches_stay_eager_with_one_reason(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    if OLD and kind == "TaylorSeer":
        pytest.skip("this diffusers forgets a cache enabled late")
    name, enable = _EAGER[kind]
    pair = Pair(name)
    pair.latents()
    with caplog.at_level(logging.WARNING, logger="dit_graphs"):
        pair.both(enable)
        assert set(pair.reasons_of(2)) == {"step_cache"}
    assert len([r for r in caplog.records if "step_cache" in r.getMessage()]) == 1
    pair.both(_disable)
    assert set(pair.reasons_of(2)) <= {"warming_up"}


@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)], ids=["asked", "drawn"]
)
def test_b55_first_block_cache_under_full_says_what_to_choose(device: str) -> None:
    """Its decision lies within the forward; one graph without an eager break cannot hold it.

    MagCache's does not. On the CPU, where "full" is no backend, the guard alone is asked.
    """
    config = _first_block(THRESHOLDS["flux"])
    pair = Pair("flux", device=device, backend="full", prepare=_enable(lambda: config))
    transformer = pair.fast.transformer
    reason, detail = state_guard(transformer, serves_caches=True, backend="full")()
    assert reason == "step_cache" and '"breakable"' in detail
    assert state_guard(transformer, serves_caches=True, backend="breakable")() is None
    if device == "cuda":
        assert pair.reasons_of(3, steps=8) == {"step_cache": 24}
        assert detail in dit_graphs.explain(pair.fast)
    pair.both(_disable)
    pair.both(_enable(_magnitude))
    assert state_guard(transformer, serves_caches=True, backend="full")() is None


def test_b55_a_bare_transformer_in_a_loop_of_ones_own() -> None:
    """`wrap` knows of caches too: a graph of the first decision would answer for all others."""
    fast, plain = tiny.build("flux"), tiny.build("flux")
    dit_graphs.wrap(fast.transformer, backend="recorded")
    for pipe in (fast, plain):
        pipe.transformer.enable_cache(_first_block(THRESHOLDS["flux"]))
    for seed in range(3):
        mine, theirs = (
            tiny.latents(p, tiny.call_kwargs("flux", size=32, steps=12, seed=seed))
            for p in (fast, plain)
        )
        assert torch.equal(mine, theirs)
    assert runner_of(fast.transformer).stats.replays >= 24


def test_b55_cache_dit_stays_eager_with_one_reason() -> None:
    """cache-dit swaps the blocks for the time of each call and decides on the host."""
    cache_dit = pytest.importorskip("cache_dit")

    pipe = tiny.build("flux")  # one only: cache-dit patches the pipeline's class
    config = cache_dit.DBCacheConfig(Fn_compute_blocks=1, max_warmup_steps=2)

    def latents() -> torch.Tensor:
        return tiny.latents(pipe, tiny.call_kwargs("flux", size=32, steps=6))

    plain = latents()
    for when in ("before", "after"):
        if when == "before":
            cache_dit.enable_cache(pipe, cache_config=config)
            expected = latents()
        dit_graphs.accelerate(pipe, backend="recorded")
        if when == "after":
            assert torch.equal(latents(), plain)
            cache_dit.enable_cache(pipe, cache_config=config)
        for _ in range(2):
            assert torch.equal(latents(), expected)
        denoiser = dit_graphs.stats(pipe)["components"]["denoiser"]
        assert denoiser["fallbacks"]["step_cache"] == 12
        cache_dit.disable_cache(pipe)
        for _ in range(2):
            assert torch.equal(latents(), plain)
        assert dit_graphs.stats(pipe)["components"]["denoiser"]["replays"] >= 3
        dit_graphs.restore(pipe)


@pytest.mark.parametrize("name", ["cond", None])
def test_a_context_is_known_by_its_name_in_every_diffusers(name: str | None) -> None:
    """Up to 0.40 the manager of a cache's states holds the name alone."""
    new = SimpleNamespace(_context=SimpleNamespace(name=name) if name else None)
    old = SimpleNamespace(_current_context=name)
    for manager in (new, old):
        assert step_caches._context_of(SimpleNamespace(state_manager=manager)) == name
