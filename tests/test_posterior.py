"""A posterior is what it says: its draws have its moments, its file is exact, and it fits one model."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from dpivon.errors import ArgumentError
from dpivon.posterior import Posterior, unwrap


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def some_posterior(model: nn.Module, dtype: torch.dtype = torch.float32) -> Posterior:
    generator = torch.Generator().manual_seed(1)
    mean = {
        n: torch.randn(p.shape, generator=generator, dtype=dtype)
        for n, p in model.named_parameters()
        if p.requires_grad
    }
    variance = {n: torch.rand(m.shape, generator=generator, dtype=dtype) for n, m in mean.items()}
    return Posterior(mean, variance, {"method": "ivon", "ess": "1000"})


def test_draws_have_the_stated_mean_and_variance() -> None:
    m, v = torch.tensor([[1.0, -2.0, 0.5]]), torch.tensor([[0.25, 4.0, 0.0]])
    q = Posterior({"w": m}, {"w": v})
    generator = torch.Generator().manual_seed(0)
    n = 20_000
    draws = torch.stack([q.sample(generator)["w"] for _ in range(n)]).double()
    assert torch.all((draws.mean(0) - m).abs() <= 5 * (v / n).sqrt() + 1e-12)
    # The sample variance of a Gaussian has standard deviation v·√(2/n).
    assert torch.all((draws.var(0) - v).abs() <= 5 * v * (2 / n) ** 0.5 + 1e-12)
    assert torch.equal(draws[:, 0, 2], torch.full((n,), 0.5, dtype=torch.float64))


def test_draws_of_different_weights_are_uncorrelated() -> None:
    q = Posterior({"a": torch.zeros(2), "b": torch.zeros(1)}, {"a": torch.ones(2), "b": torch.ones(1)})
    generator = torch.Generator().manual_seed(0)
    draws = [q.sample(generator) for _ in range(10_000)]
    flat = torch.stack([torch.cat([d["a"], d["b"]]) for d in draws])
    assert torch.all((torch.corrcoef(flat.T) - torch.eye(3)).abs() < 0.05)


def test_a_seed_fixes_the_draw_whatever_the_order_of_names() -> None:
    mean, variance = {"b": torch.zeros(3), "a": torch.zeros(2)}, {"b": torch.ones(3), "a": torch.ones(2)}
    one = Posterior(mean, variance).sample(torch.Generator().manual_seed(7))
    two = Posterior(dict(sorted(mean.items())), variance).sample(torch.Generator().manual_seed(7))
    other = Posterior(mean, variance).sample(torch.Generator().manual_seed(8))
    assert torch.equal(one["a"], two["a"])
    assert torch.equal(one["b"], two["b"])
    assert not torch.equal(one["a"], other["a"])


def test_sampling_leaves_the_posterior_alone() -> None:
    q = some_posterior(network())
    before = {n: m.clone() for n, m in q.mean.items()}
    q.sample()
    assert all(torch.equal(before[n], q.mean[n]) for n in before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_save_and_load_are_bit_equal(tmp_path: Path, dtype: torch.dtype) -> None:
    q = some_posterior(network(), dtype)
    q.save(tmp_path / "q.safetensors")
    r = Posterior.load(tmp_path / "q.safetensors")
    assert r.metadata == q.metadata
    assert r.mean.keys() == q.mean.keys()
    for n in q.mean:
        assert r.mean[n].dtype == dtype
        assert torch.equal(r.mean[n], q.mean[n])
        assert torch.equal(r.variance[n], q.variance[n])
    theta, again = (p.sample(torch.Generator().manual_seed(3)) for p in (q, r))
    assert all(torch.equal(theta[n], again[n]) for n in theta)


def test_views_of_one_flat_vector_can_be_saved(tmp_path: Path) -> None:
    flat = torch.arange(6.0)
    q = Posterior({"a": flat[:2], "b": flat[2:].view(2, 2).T}, {"a": flat[:2], "b": flat[2:].view(2, 2)})
    q.save(tmp_path / "q")
    assert torch.equal(Posterior.load(tmp_path / "q").mean["b"], torch.tensor([[2.0, 4.0], [3.0, 5.0]]))


def test_a_failed_save_keeps_the_old_file_and_leaves_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "q.safetensors"
    q = some_posterior(network())
    q.save(path)
    old = path.read_bytes()

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        Posterior.point(network()).save(path)
    assert path.read_bytes() == old
    assert os.listdir(tmp_path) == ["q.safetensors"]


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("writer", [lambda o, p: p.write_bytes(pickle.dumps(o)), torch.save])
def test_a_pickle_is_refused_and_not_run(tmp_path: Path, writer) -> None:  # type: ignore[no-untyped-def]
    trace, path = tmp_path / "ran", tmp_path / "q.pt"
    writer(Bomb(trace), path)
    with pytest.raises(ArgumentError, match=r"q\.pt.*cannot be read as a safetensors file"):
        Posterior.load(path)
    assert not trace.exists()
    torch.load(path, weights_only=False) if writer is torch.save else pickle.loads(path.read_bytes())
    assert trace.exists()  # the file was a live one


@pytest.mark.parametrize("keep", [0, 1, 8, 100, -1])
def test_a_truncated_file_is_one_clear_error(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "q.safetensors"
    some_posterior(network()).save(path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ArgumentError, match=r"q\.safetensors"):
        Posterior.load(path)


def test_files_that_are_no_posterior_are_named(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    with pytest.raises(ArgumentError, match=r"x\.safetensors.*not an existing file"):
        Posterior.load(path)
    with pytest.raises(ArgumentError, match="not an existing file"):
        Posterior.load(tmp_path)
    save_file({"w": torch.ones(1)}, path)
    with pytest.raises(ArgumentError, match=r"x\.safetensors.*holds no posterior"):
        Posterior.load(path)
    save_file({"w": torch.ones(1)}, path, {"dpivon_posterior": "1"})
    with pytest.raises(ArgumentError, match=r"x\.safetensors.*'w'"):
        Posterior.load(path)
    save_file({"mean.w": torch.ones(1)}, path, {"dpivon_posterior": "2"})
    with pytest.raises(ArgumentError, match=r"x\.safetensors.*format 2"):
        Posterior.load(path)
    save_file({"mean.w": torch.ones(1), "variance.w": -torch.ones(1)}, path, {"dpivon_posterior": "1"})
    with pytest.raises(ArgumentError, match=r"x\.safetensors.*at least 0"):
        Posterior.load(path)


def test_saving_where_nothing_can_be_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="folder that does not exist"):
        Posterior.point(network()).save(tmp_path / "no" / "q")
    with pytest.raises(ArgumentError, match="is a folder"):
        Posterior.point(network()).save(tmp_path)


@pytest.mark.parametrize(
    ("mean", "variance", "message"),
    [
        ({}, {}, "no parameters"),
        ({"w": torch.ones(2)}, {}, "variance.*lacks 'w'"),
        ({"w": torch.ones(2)}, {"w": torch.ones(2), "b": torch.ones(1)}, "mean.*lacks 'b'"),
        ({"w": torch.ones(2)}, {"w": torch.ones(1)}, "'w'.*shape"),
        ({"w": torch.ones(2)}, {"w": torch.tensor([1.0, -1.0])}, "'w'.*-1.0.*at least 0"),
        ({"w": torch.ones(2)}, {"w": torch.tensor([1.0, float("inf")])}, "variance.*'w'.*infinite"),
        ({"w": torch.tensor([float("nan")])}, {"w": torch.ones(1)}, "mean.*'w'.*NaN"),
        ({"w": torch.ones(2).half()}, {"w": torch.ones(2).half()}, "'w'.*float16.*float32"),
        ({"w": [1.0]}, {"w": torch.ones(1)}, "'w'.*list.*tensor"),
    ],
)
def test_what_is_no_gaussian_is_refused(mean, variance, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ArgumentError, match=message):
        Posterior(mean, variance)


def test_metadata_is_text_and_leaves_the_format_key_alone() -> None:
    w = {"w": torch.ones(1)}
    with pytest.raises(ArgumentError, match="text"):
        Posterior(w, w, {"ess": 3})  # type: ignore[dict-item]
    with pytest.raises(ArgumentError, match="file format"):
        Posterior(w, w, {"dpivon_posterior": "9"})


def test_it_is_detached_and_holds_dicts_of_its_own() -> None:
    w = {"w": torch.ones(1, requires_grad=True)}
    q = Posterior(w, w)
    w["b"] = torch.zeros(1)
    assert not q.mean["w"].requires_grad
    assert list(q.mean) == ["w"]


def test_small_properties() -> None:
    q = Posterior({"w": torch.ones(2, 3)}, {"w": torch.full((2, 3), 4.0)}, {"method": "ivon"})
    assert q.num_parameters == 6
    assert torch.equal(q.std["w"], torch.full((2, 3), 2.0))
    assert q.to(dtype=torch.float64).mean["w"].dtype == torch.float64
    assert q.to("cpu").metadata == {"method": "ivon"}
    with pytest.raises(ArgumentError, match="float32 or float64"):
        q.to(dtype=torch.float16)
    assert "6 parameters" in repr(q)


def test_point_copies_the_trainable_parameters() -> None:
    model = network()
    model[0].requires_grad_(False)
    q = Posterior.point(model)
    assert list(q.mean) == ["1.weight", "1.bias", "2.weight", "2.bias"]
    assert not any(v.any() for v in q.variance.values())
    old = model[2].weight.detach().clone()
    with torch.no_grad():
        model[2].weight.add_(1)
    assert torch.equal(q.mean["2.weight"], old)
    assert torch.equal(q.sample()["2.weight"], old)
    assert len(Posterior.point(model.requires_grad_(False)).mean) == 6
    assert Posterior.point(network().bfloat16()).mean["0.weight"].dtype == torch.float32
    with pytest.raises(ArgumentError, match=r"ReLU.*no parameters"):
        Posterior.point(nn.ReLU())


def test_matches_names_the_first_parameter_that_does_not_fit() -> None:
    model = network()
    q = some_posterior(model)
    assert q.matches(model)
    assert q.for_model(model) is q
    assert q.matches(network().requires_grad_(False))  # frozen for inference
    with pytest.raises(ArgumentError, match=r"2\.weight.*\(2, 4\).*\(5, 4\)"):
        q.matches(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 5)))
    with pytest.raises(ArgumentError, match=r"1\.weight.*no parameter of the model"):
        q.matches(nn.Sequential(nn.Linear(3, 4)))
    with pytest.raises(ArgumentError, match=r"3\.weight.*trainable but not in the posterior"):
        q.matches(nn.Sequential(*network(), nn.Linear(2, 2)))
    assert q.matches(nn.Sequential(*network(), nn.Linear(2, 2).requires_grad_(False)))


def test_positions_are_matched_to_the_trainable_parameters() -> None:
    model = nn.Sequential(nn.Linear(3, 4), *[nn.Linear(4, 4) for _ in range(6)])
    model[0].requires_grad_(False)
    named = some_posterior(model)
    positional = Posterior(
        {str(i): m for i, m in enumerate(named.mean.values())},
        # In another order: it is the number that counts, and "10" comes after "9".
        {str(i): v for i, v in sorted(enumerate(named.variance.values()), key=lambda pair: str(pair[0]))},
    )
    bound = positional.for_model(model)
    assert list(bound.mean) == list(named.mean)
    assert all(torch.equal(bound.mean[n], named.mean[n]) for n in named.mean)
    assert all(torch.equal(bound.variance[n], named.variance[n]) for n in named.mean)
    with pytest.raises(ArgumentError, match=r"'0'.*'0\.weight'.*optimizer\.posterior\(model\)"):
        positional.matches(nn.Sequential(nn.Linear(4, 5), *[nn.Linear(4, 4) for _ in range(5)]))
    with pytest.raises(ArgumentError, match=r"14 trainable.*optimizer\.posterior\(model\)"):
        positional.matches(model.requires_grad_(True))


def test_names_that_are_numbers_by_themselves_are_names() -> None:
    model = nn.ParameterList([torch.zeros(1), torch.zeros(1)])
    q = Posterior({"1": torch.ones(1), "0": torch.zeros(1)}, {"1": torch.ones(1), "0": torch.ones(1)})
    assert torch.equal(q.for_model(model).mean["1"], torch.ones(1))


def test_only_wrappers_are_unwrapped() -> None:
    class GradSampleModule(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self._module = module

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self._module = nn.Linear(2, 2)

    inner, own = network(), Net()
    assert unwrap(GradSampleModule(GradSampleModule(inner))) is inner
    assert unwrap(own) is own
    assert Posterior.point(GradSampleModule(inner)).matches(inner)
    assert some_posterior(inner).matches(GradSampleModule(inner))


def test_the_same_posterior_is_the_same_file(tmp_path):
    """Metadata of safetensors come in another order every time it writes them."""
    q = Posterior({"w": torch.ones(3)}, {"w": torch.ones(3)}, {name: name * 2 for name in "gfedcba"})
    for i in range(4):
        q.save(tmp_path / f"{i}.safetensors")
    assert len({(tmp_path / f"{i}.safetensors").read_bytes() for i in range(4)}) == 1
    assert Posterior.load(tmp_path / "0.safetensors").metadata == q.metadata
