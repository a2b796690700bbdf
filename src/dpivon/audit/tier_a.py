"""Tier A, deterministic: neighbouring data, equal random streams, forced membership, and noise that the auditor answers.

Nothing here looks inside the library: batches go in, and what the optimizer is handed comes out. With silent noise
b·g_dp is the clipped sum S; what is claimed of it is then checked to rounding.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dpivon.audit.draws import DRAWS
from dpivon.audit.probes import cancelling_probe, with_extremes
from dpivon.audit.session import (
    Setting,
    Subject,
    Tier,
    Verdict,
    clipped_sum,
    drowned,
    is_random,
    one_std,
    side_by_side,
    silence,
    start,
    unknown,
)
from dpivon.audit.tier_c import gaussian_epsilon
from dpivon.errors import ArgumentError
from dpivon.privacy.accounting import epsilon

TOLERANCE = 1e-5  # of C, in what one example may move
AGREEMENT = 1e-3  # of C, between a sum and the definition of it
TIER_A, _POWER = Tier("A"), "to rounding, on these data and their extremes"


def _members(subject: Subject) -> int:
    return min(12, len(subject.inputs))


def _setting(subject: Subject, **changes: float) -> Setting:
    n = _members(subject) + 1
    return Setting(size=n, batch=float(n)).but(**changes)


def _size(t: Tensor) -> float:
    """‖t‖; ∞ if anything in it is not finite, so that no comparison passes on a NaN."""
    norm = float(t.norm())
    return norm if math.isfinite(norm) else math.inf


@TIER_A.asks("Is b·g_dp − noise the sum of clipped per-example gradients?", _POWER)
def the_sum_is_what_the_definition_says(subject: Subject) -> Verdict:
    """S = Σ g_i min(1, C/‖g_i‖) for batches of several sizes, divided by the expected batch; at two bounds and two steps."""
    if why := unknown(subject):
        return None, why
    worst = 0.0
    n = _members(subject)
    for bound in (0.05, 0.7, 1e4):
        setting = _setting(subject, bound=bound)
        session = start(subject, setting, silence)
        for rows in (list(range(n)), [1], [], list(range(n // 2))):
            seen = session.step(rows)
            expected = clipped_sum(subject, seen, rows, bound)
            scale = min(bound, _size(expected) + 1.0)
            worst = max(worst, _size(seen.released * setting.batch - expected) / scale)
    return worst <= AGREEMENT, f"off by at most {worst:.1e} C"


@TIER_A.asks("Is the sensitivity C, for the worst examples too?", _POWER)
def one_example_moves_the_sum_by_at_most_c(subject: Subject) -> Verdict:
    """Alone, and among others where what those give does not depend on it: a draw or a rounding to bf16 may."""
    worst, at, lost = 0.0, "", False
    alone = bool(unknown(subject))
    n = _members(subject)
    larger, places = with_extremes(subject, n)
    size = len(larger.inputs)
    for bound in (0.01, 0.7):
        batches: list[list[int]] = [[], *([i] for i in places.values())]
        if not alone:
            batches += [list(range(n)), *([*range(n), i] for i in places.values())]
        sums = side_by_side(larger, Setting(size=size, batch=float(size), bound=bound), batches)
        half = len(places) + 1
        for k, kind in enumerate(places, 1):
            moved = [_size(with_x - without) / bound for with_x, without in _pairs(sums, k, half)]
            lost |= kind == "scaled by 30" and bound == 0.01 and min(moved) < 0.1
            for m in moved:
                if m > worst:
                    worst, at = m, kind
    ok = worst <= 1 + TOLERANCE and not lost
    return ok, f"at most {worst:.6f} C ({at})" + ("; an example was lost" if lost else "")


def _pairs(sums: list[Tensor], k: int, half: int) -> list[tuple[Tensor, Tensor]]:
    """Sums with and without example k: alone, and among others where those were computed."""
    alone = [(sums[k], sums[0])]
    return alone if len(sums) == half else [*alone, (sums[half + k], sums[half])]


@TIER_A.asks("Is what is added up what was measured, to its rounding?", _POWER)
def an_example_that_cancels_moves_the_sum_by_at_most_c(subject: Subject) -> Verdict:
    """Alone: among others a mean over the batch rounds what those give anew, and here roundings are all there is."""
    cancelling = cancelling_probe(subject)
    n, bound = len(cancelling.inputs), 0.01
    setting = Setting(size=n, batch=float(n), bound=bound)
    try:
        start(cancelling, setting, silence)
    except ArgumentError:  # as dropout does, which needs a hidden layer
        return None, "the method does not train a network of one linear layer"
    empty, *sums = side_by_side(cancelling, setting, [[], *([i] for i in range(n))])
    moved = [_size(total - empty) / bound for total in sums]
    lost = max(moved) < 0.1 and not subject.autocast  # rounded to bf16 the halves are equal
    ok = max(moved) <= 1 + TOLERANCE and not lost
    return ok, f"at most {max(moved):.6f} C" + ("; every example was lost" if lost else "")


@TIER_A.asks("Does rounding stay below one example's share?", _POWER)
def a_large_coherent_batch_rounds_by_less_than_an_example(subject: Subject) -> Verdict:
    """A sum of many parallel gradients is as many times as long as one of them, and so is its rounding."""
    if not subject.inputs.is_floating_point() or is_random(subject):
        return None, "needs real-valued inputs and a deterministic forward pass"
    n, bound = 321, 0.01
    generator = torch.Generator().manual_seed(0)
    x = subject.inputs[:1] * (1 + 1e-3 * torch.randn(n, *[1] * (subject.inputs.dim() - 1), generator=generator))
    many = subject.but(inputs=x, labels=subject.labels[:1].repeat(n))
    batches = [list(range(n)), *([j for j in range(n) if j != i] for i in (0, 200, n - 1))]
    whole, *rest = side_by_side(many, Setting(size=n, batch=float(n), bound=bound), batches)
    worst = max(_size(whole - without) / bound for without in rest)
    return worst <= 1 + TOLERANCE, f"one of {n} moves the sum by {worst:.6f} C"


@TIER_A.asks("Is the noise scaled to σC/b, and is it stated to the optimizer?", _POWER)
def the_noise_is_sigma_c_over_b(subject: Subject) -> Verdict:
    """Noise of one standard deviation moves the release by σC/b in every coordinate; stated to the optimizer is its square."""
    setting = _setting(subject)
    rows = list(range(_members(subject) // 2))
    quiet, loud = (start(subject, setting, answer).step(rows) for answer in (silence, one_std))
    std = setting.sigma * setting.bound / setting.batch
    off = float(((loud.released - quiet.released) / std - 1).abs().max())
    stated = loud.variance / std**2
    return off < 1e-5 and abs(stated - 1) < 1e-5, f"σC/b off by {off:.1e}; stated variance {stated:.6f} (σC/b)²"


@TIER_A.asks("Do NoiseSpec, shapes and charges ignore the data?", _POWER)
def what_is_public_does_not_depend_on_the_data(subject: Subject) -> Verdict:
    n = _members(subject)
    setting = _setting(subject)
    larger, places = with_extremes(subject, n)
    extra = places.get("scaled by 30", places["ordinary"])
    both = [*range(n), extra]
    facts = []
    for m in (n, n + 1):
        data = {"inputs": larger.inputs[both[:m]], "labels": larger.labels[both[:m]]}
        session = start(subject.but(**data), setting, silence)
        seen = [session.step(range(m)) for _ in range(3)]
        spec = session.spec()
        facts.append(
            (spec, spec.digest, [s.variance for s in seen], [len(s.released) for s in seen], len(session.charged))
        )
        stated = (spec.noise_multiplier, spec.max_grad_norm, spec.expected_batch_size, spec.sample_rate)
        if stated != (setting.sigma, setting.bound, setting.batch, setting.rate) or not spec.poisson:
            return False, f"NoiseSpec states {stated}"
        if session.accountant().history != [(setting.sigma, setting.rate, 3)]:
            return False, f"charged {session.accountant().history} for 3 releases"
    return facts[0] == facts[1], "σ, C, b, q, shapes, variances and charges are equal on D and D ∪ {x}"


@TIER_A.asks("Is every release charged before its noise is drawn, the empty batch too?", _POWER)
def every_release_is_charged_first_and_once(subject: Subject) -> Verdict:
    setting = _setting(subject)
    session = start(subject, setting, silence)
    rows = list(range(_members(subject)))
    for k, batch in enumerate((rows, rows[:1], [], rows), 1):
        session.charged.clear()
        session.step(batch)
        if not session.charged:
            return False, f"no noise was drawn for a batch of {len(batch)}"
        if set(session.charged) != {k}:
            return False, f"{session.charged[0]} releases charged when the noise of release {k} was drawn"
    history = session.accountant().history
    return history == [(setting.sigma, setting.rate, 4)], f"the account holds {history}"


@TIER_A.asks("Is ε at least the cost of what was done?", _POWER)
def the_account_is_no_less_than_the_mechanism(subject: Subject) -> Verdict:
    """At q = 1 the ε of T Gaussian releases is known exactly; at q < 1 it falls with σ and rises with T."""
    setting = _setting(subject, sigma=1.0)
    session = start(subject, setting, silence)
    exact = {}
    for t in (1, 2, 3):
        session.step(range(_members(subject)))
        exact[t] = gaussian_epsilon(math.sqrt(t) / setting.sigma, 1e-5)
        for name in ("rdp", "pld"):
            claimed = epsilon(session.accountant().history, 1e-5, name)
            if claimed < exact[t] * (1 - 1e-3):
                return False, f"{name} claims ε = {claimed:.4f} after {t} releases that cost {exact[t]:.4f}"
        stated = session.accountant().get_epsilon(1e-5)
        if stated < exact[t] * (1 - 1e-3):
            return False, f"ε = {stated:.4f} after {t} releases that cost {exact[t]:.4f}"
    few, many, loud = (epsilon([(s, 0.05, t)], 1e-5) for s, t in ((1.0, 100), (1.0, 200), (2.0, 100)))
    return loud < few < many, f"ε at q = 1, T = 3: exactly {exact[3]:.3f}, claimed {stated:.3f}"


@TIER_A.asks("Does the optimizer learn from the release only?", _POWER)
def with_the_release_frozen_the_data_leave_no_trace(subject: Subject) -> Verdict:
    """Noise so large that in fp32 nothing else is left: whatever differs then came past the boundary."""
    if any(p.dtype != torch.float32 for p in subject.trained()):
        return None, "needs a model in fp32, where a release can be drowned in its noise"
    if subject.inputs.is_floating_point():
        subject = subject.but(inputs=30.0 * subject.inputs)
    different, known = 0, 0
    # Powers of two, so that the drowning noise is not rounded. Large gradients, so that a trace of them would be seen, for one
    # step: a curvature is made of fourth powers, and in the next it may overflow. And small ones for several.
    for bound, steps in ((8.0, 1), (2.0**-10, 3)):
        states = _drowned_states(subject, bound, steps)
        if states is None:
            return False, "two batches gave one sum: the check has no force"
        different += sum(not torch.equal(a, b) for a, b in zip(*states, strict=True))
        known += len(states[0])
    return different == 0, f"{different} of {known} tensors of the state differ"


def _drowned_states(subject: Subject, bound: float, steps: int) -> list[list[Tensor]] | None:
    """What is kept after so many steps on either of two batches whose sums are lost in noise; None if the sums are alike."""
    n, states, sums = _members(subject), [], []
    setting = _setting(subject, bound=bound, sigma=2.0**-10, lr=2.0**-33 / bound)
    for rows in (list(range(n // 2)), list(range(n // 2, n))):
        session = start(subject, setting, drowned(setting.batch, bound))
        sums.append(start(subject, setting, silence).step(rows).released)
        for _ in range(steps):
            session.step(rows)
        states.append([t.clone() for t in session.state()])
    return None if torch.equal(*sums) else states


@TIER_A.asks("Is a batch that does not fit released once, and whole?", _POWER)
def a_batch_in_parts_is_one_release_of_all_of_it(subject: Subject) -> Verdict:
    n = _members(subject)
    x = torch.cat([subject.inputs[:n]] * 3)
    many = subject.but(inputs=x, labels=torch.cat([subject.labels[:n]] * 3))
    setting = Setting(size=3 * n, batch=2.0)
    rows = list(range(3 * n))
    results = []
    for answer in (silence, one_std):
        session = start(many, setting, answer)
        seen = session.step_in_parts(rows)
        if len(seen) != 1 or len(session.accountant()) != 1:
            return False, f"{len(seen)} releases and {len(session.accountant())} charges for one batch"
        results.append(seen[0])
    std = setting.sigma * setting.bound / setting.batch
    noise = float(((results[1].released - results[0].released) / std - 1).abs().max())
    if unknown(subject):
        return noise < 1e-5, f"one release, one charge; its noise is off by {noise:.1e}"
    expected = clipped_sum(many, results[0], rows, setting.bound)
    off = _size(results[0].released * setting.batch - expected) / setting.bound
    return off <= 3 * AGREEMENT and noise < 1e-5, f"sum off by {off:.1e} C, noise by {noise:.1e}"


@TIER_A.asks("Does an abandoned batch leave nothing in the next sum?", _POWER)
def a_batch_that_was_left_leaves_nothing_behind(subject: Subject) -> Verdict:
    n = _members(subject)
    setting = _setting(subject)
    session = start(subject, setting, silence)
    if not session.leave_half_way(range(n // 2)):
        return None, "the parts of a batch are summed in one call, which returns all of them or nothing"
    if unknown(subject):
        moved = _size(session.step([0]).released * setting.batch) / setting.bound
        return moved <= 1 + TOLERANCE, f"a batch of one example sums to {moved:.6f} C afterwards"
    rows = list(range(n // 2, n))
    seen = session.step(rows)
    off = seen.released * setting.batch - clipped_sum(subject, seen, rows, setting.bound)
    return _size(off) <= AGREEMENT * setting.bound, f"the next sum is off by {_size(off) / setting.bound:.1e} C"


@TIER_A.asks("Are several θ-samples one clip and one charge?", _POWER)
def several_samples_of_theta_are_clipped_as_one(subject: Subject) -> Verdict:
    if subject.stacked:
        return None, "this path takes one θ-sample a step, and refuses more"
    setting = _setting(subject, bound=1e-3, mc_samples=3)
    session = start(subject, setting, silence)
    seen = session.step([0])
    if seen.draws == 1:
        return None, "the method takes gradients at one point"
    moved = _size(seen.released * setting.batch) / setting.bound
    charges = len(session.accountant())
    return (
        moved <= 1 + TOLERANCE and charges == 1,
        f"one example sums to {moved:.6f} C over {seen.draws} samples; {charges} charge",
    )


@TIER_A.asks("Does a new C reach clipping, noise and correction?", _POWER)
def a_changed_bound_changes_clipping_and_noise_together(subject: Subject) -> Verdict:
    setting = _setting(subject)
    facts = []
    for answer in (silence, one_std):
        session = start(subject, setting, silence)
        session.step([0])
        session.answer = answer
        if not session.rebound(1e-3):
            return None, "C is fixed for the life of a stack"
        facts.append(session.step([0]))
    moved = _size(facts[0].released * setting.batch) / 1e-3
    std = float((facts[1].released - facts[0].released).mean()) * setting.batch / (setting.sigma * 1e-3)
    stated = facts[0].variance / (setting.sigma * 1e-3 / setting.batch) ** 2
    ok = moved <= 1 + TOLERANCE and abs(std - 1) < 1e-4 and abs(stated - 1) < 1e-5
    return ok, f"after C → C/700 an example moves {moved:.6f} C, the noise is {std:.6f} σC"


@TIER_A.asks("Does a new σ reach noise, correction and account?", _POWER)
def a_changed_sigma_is_added_stated_and_charged(subject: Subject) -> Verdict:
    setting = _setting(subject)
    sigma, facts = 3 * setting.sigma, []
    for answer in (silence, one_std):
        session = start(subject, setting, silence)
        session.step([0])
        session.answer = answer
        if not session.renoise(sigma):
            return None, "σ is fixed for the life of a stack"
        facts.append(session.step([0]))
    std = sigma * setting.bound / setting.batch
    off = float(((facts[1].released - facts[0].released) / std - 1).abs().max())
    stated, history = facts[0].variance / std**2, session.accountant().history
    right = history == [(setting.sigma, setting.rate, 1), (sigma, setting.rate, 1)]
    ok = off < 1e-4 and abs(stated - 1) < 1e-5 and right
    return ok, f"after σ → 3σ the noise is off by {off:.1e}, stated {stated:.6f} (σC/b)², charged {history}"


TIER_A.extend(DRAWS)
